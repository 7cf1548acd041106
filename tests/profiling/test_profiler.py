"""The profiler: its numbers are those of things whose time is known, and nothing is changed by measuring."""

import json
import math
import os
import random
import re
import resource
import signal
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F

from profiler import PerformanceProfiler, compare_amp_performance
from profiler import main as profile
from tests.conftest import RANK_VARIABLES, ROOT, WEIGHTED
from tests.docs.test_docs import DOCUMENTS, code_blocks, reference, rows, shown_default
from tests.helpers.sleepy_task import Rest
from tests.parallel.test_launch import free_port
from trainer.config import FlagGroup, build_parser, flag_name
from trainer.loading.errors import BadInput
from trainer.parallel.base import SingleDevice
from trainer.parallel.ddp import Distributed
from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags
from trainer.parallel.environment import RankEnvironment
from trainer.profiling import check, command, prediction, processes, scaling, step
from trainer.profiling.batch_size import search
from trainer.profiling.chart import draw_scaling
from trainer.profiling.excerpt import opened, train_steps
from trainer.profiling.exchange import LARGE_BYTES, sums_are_right
from trainer.profiling.flags import BatchSizeFlags, CheckFlags, PredictFlags, ScalingFlags, StepFlags
from trainer.profiling.measure import measure
from trainer.profiling.phases import BACKWARD, COPY, DATA, FORWARD, OPTIMIZER, PHASES, REST, watched
from trainer.profiling.processes import World
from trainer.profiling.step_model import FIRST_BUCKET_BYTES, Compute, Link, buckets, predict

SLEEPY = f"{ROOT / 'tests' / 'helpers' / 'sleepy_task.py'}:Sleepy"
ANY_BATCH = ["--task", WEIGHTED, "--num-train", "40", "--num-threads", "1", "--device", "cpu"]
TINY = [*ANY_BATCH, "--batch-size", "8"]
SHORT = ["--steps", "4", "--settling-steps", "1"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def profile_here(capsys, monkeypatch):
    """Runs a command line of profiler.py in this process; returns what it printed, (out, err)."""

    def run(*argv, status=0, environment=None):
        monkeypatch.setattr("sys.argv", ["profiler.py"])
        assert profile([str(arg) for arg in argv], environment) == status
        return capsys.readouterr()

    return run


# --- the library: any model --------------------------------------------------------------------------------------


class Resting(nn.Module):
    """Sleeps in forward, for each sample too, and in backward."""

    def __init__(self, forward_s=0.0, backward_s=0.0, per_sample_s=0.0):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.seconds = forward_s, backward_s, per_sample_s

    def forward(self, x):
        forward_s, backward_s, per_sample_s = self.seconds
        time.sleep(forward_s + per_sample_s * len(x))
        return Rest.apply(self.linear(x), backward_s)


class Sums(nn.Module):
    """As Lockstep's objectives: sums of a batch that is a dictionary."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch):
        return {"loss": F.cross_entropy(self.linear(batch["x"]), batch["y"], reduction="sum"), "n": torch.ones(1)}


def loader(kind, num_batches=3, size=4):
    for _ in range(num_batches):
        x, y = torch.randn(size, 3), torch.randint(2, (size,))
        yield {"tensor": x, "mapping": {"x": x, "y": y}, "pair": (x, y)}[kind]


def quick(model, batches, **options):
    return PerformanceProfiler(model, batches, **{"repeats": 5, "warm_up": 1, **options})


def test_sleep_in_forward_is_found_in_forward_alone():
    profiler = quick(Resting(forward_s=0.02), loader("tensor"))
    forward, backward = profiler.profile_forward_pass(), profiler.profile_backward_pass()
    assert 20 <= forward["forward_ms_p10"] <= forward["forward_ms_median"] <= forward["forward_ms_p90"]
    assert forward["inference_ms_median"] >= 20
    assert forward["samples_per_second"] == pytest.approx(4e3 / forward["forward_ms_median"])
    assert backward["backward_ms_p10"] < 10
    assert backward["forward_backward_ms_p10"] >= 20


def test_sleep_in_backward_is_found_in_backward_alone():
    profiler = quick(Resting(backward_s=0.02), loader("tensor"))
    assert profiler.profile_forward_pass()["forward_ms_p10"] < 10
    backward = profiler.profile_backward_pass()
    assert 20 <= backward["backward_ms_median"] <= backward["forward_backward_ms_median"]


@pytest.mark.parametrize(("kind", "model", "loss"), [
    ("tensor", nn.Linear(3, 2), None),
    ("mapping", Sums(), None),
    ("pair", nn.Linear(3, 2), F.cross_entropy),
    ("pair", nn.Linear(3, 2), None),
])  # fmt: skip
def test_full_profile_of_every_kind_of_batch(kind, model, loss, tmp_path):
    profiler = quick(model, loader(kind), loss=loss, repeats=2)
    with profiler.timer("augmentation"):
        time.sleep(0.01)
    report = profiler.run_full_profile(tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text()) == report
    assert report["environment"]["num_parameters"] == 8
    assert report["forward"]["batch_size"] == report["backward"]["batch_size"] == 4
    assert [row["batch_size"] for row in report["batch_sizes"]["batch_sizes"]] == [2, 4, 8, 16]
    assert report["timings"]["augmentation"]["ms_median"] >= 10
    assert report["timings"]["augmentation"]["count"] == 1
    numbers = [v for part in ("data", "forward", "backward", "memory") for v in report[part].values()]
    assert all(math.isfinite(value) and value >= 0 for value in numbers)


def test_full_profile_makes_the_folder_of_its_file(tmp_path):
    path = tmp_path / "deep" / "missing" / "profile.json"
    report = quick(nn.Linear(3, 2), loader("tensor"), repeats=1).run_full_profile(path)
    assert json.loads(path.read_text()) == report


def test_full_profile_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").touch()
    batches = loader("tensor")
    with pytest.raises(NotADirectoryError, match=re.escape(f"'{tmp_path / 'file'}'")):
        quick(nn.Linear(3, 2), batches).run_full_profile(tmp_path / "file" / "profile.json")
    assert len(list(batches)) == 3  # none was read


def test_memory_is_that_of_the_tensors():
    second = nn.Linear(512, 512, bias=False)
    model = nn.Sequential(nn.Linear(1024, 512, bias=False), nn.BatchNorm1d(512, affine=False), second)
    memory = quick(model, [torch.randn(256, 1024)]).profile_memory()
    assert memory["parameters_mib"] == memory["gradients_mib"] == 3
    assert memory["buffers_mib"] == pytest.approx((2 * 512 * 4 + 8) / 2**20)
    # The inputs of the three layers, and a few numbers for each feature.
    assert memory["saved_for_backward_mib"] == pytest.approx(1 + 0.5 + 0.5, rel=0.02)
    assert memory["peak_memory_mib"] > 50


def test_warm_up_does_not_count():
    class SlowAtFirst(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            time.sleep(0.03 if self.calls <= 2 else 0)
            return super().forward(x)

    def longest(method):
        profiler = quick(SlowAtFirst(3, 2), loader("tensor"), warm_up=2, repeats=2)
        return max(value for name, value in getattr(profiler, method)().items() if name.endswith("_p90"))

    assert longest("profile_forward_pass") < 20 and longest("profile_backward_pass") < 20


def test_batch_sizes_are_compared_by_samples_per_second():
    """A forward that costs 8 ms and 1 ms a sample: the more samples, the faster."""
    profiler = quick(Resting(forward_s=0.008, per_sample_s=0.001), loader("tensor"), repeats=3)
    result = profiler.benchmark_batch_sizes([2, 16])
    two, sixteen = result["batch_sizes"]
    assert 10 <= two["forward_backward_ms_p10"] < 24 <= sixteen["forward_backward_ms_p10"]
    assert result["fastest_batch_size"] == result["largest_batch_size"] == 16


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("no room"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_batch_that_does_not_fit_is_told_as_such(error):
    class Small(nn.Linear):
        def forward(self, x):
            if len(x) > 8:
                raise error
            return super().forward(x)

    result = quick(Small(3, 2), loader("tensor")).benchmark_batch_sizes([4, 8, 16])
    assert [row["fits"] for row in result["batch_sizes"]] == [True, True, False]
    assert result["largest_batch_size"] == 8


def test_failure_that_is_not_for_want_of_memory_is_not_taken_for_it():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        quick(nn.Linear(4, 2), loader("tensor")).benchmark_batch_sizes([4])


def state_of(model):
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return {
        "weights": [value.clone() for value in model.state_dict().values()],
        "gradients": gradients,
        "modes": [module.training for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.random.get_state()[1].copy()),
        "python": random.getstate(),
    }


def same(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_measuring_changes_nothing_of_the_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[1].eval()
    model(torch.randn(5, 3)).sum().backward()
    model[0].bias.grad = None
    own_gradient = model[0].weight.grad
    batches = list(loader("pair"))

    class Drawing(list):
        def __iter__(self):
            for batch in super().__iter__():
                random.random(), np.random.random(), torch.rand(1)
                yield batch

    before = state_of(model)
    quick(model, Drawing(batches), loss=F.cross_entropy, repeats=2).run_full_profile()
    compare_amp_performance(model, Drawing(batches), loss=F.cross_entropy, repeats=2, warm_up=1)
    after = state_of(model)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert model[0].weight.grad is own_gradient


def test_nothing_is_changed_by_a_model_that_fails_either():
    class Failing(nn.BatchNorm1d):
        def forward(self, x):
            super().forward(x)
            raise ArithmeticError

    model = Failing(3).eval()
    before = state_of(model)
    with pytest.raises(ArithmeticError):
        quick(model, loader("tensor")).profile_forward_pass()
    assert same(before["weights"], state_of(model)["weights"])
    assert not model.training


def test_amp_is_compared_on_the_same_batches():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    found = compare_amp_performance(Watched(3, 2), loader("pair"), loss=F.cross_entropy, repeats=2, warm_up=1)
    assert seen == [False, True] * 3
    assert found.keys() == {"float32", "bf16"}
    assert 0 < found["bf16"]["loss_relative_difference"] < 0.05
    ratio = found["float32"]["forward_backward_ms_median"] / found["bf16"]["forward_backward_ms_median"]
    assert found["bf16"]["speedup"] == pytest.approx(ratio)


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


class Named(nn.Linear):
    def forward(self, x):
        return {"output": super().forward(x)}


def test_mistakes_of_the_caller_are_named():
    with pytest.raises(ValueError, match="yields no batch"):
        quick(nn.Linear(3, 2), []).profile_forward_pass()
    with pytest.raises(TypeError, match="pass a loss function"):
        quick(Detached(3, 2), loader("tensor")).profile_backward_pass()
    with pytest.raises(
        TypeError, match=r"\['output'\]; let it return its \"loss\" too, or pass a loss function with bat"
    ):
        quick(Named(3, 2), loader("tensor")).profile_backward_pass()
    with pytest.raises(TypeError, match=r"\(inputs, targets\), not a dict; or let the model return its \"loss\""):
        quick(Sums(), loader("mapping"), loss=F.cross_entropy).profile_backward_pass()
    with pytest.raises(TypeError, match=r"needs batches of \(inputs, targets\)"):
        quick(nn.Linear(3, 2), loader("tensor"), loss=F.cross_entropy).profile_backward_pass()
    with pytest.raises(ValueError, match="at least 1"):
        quick(nn.Linear(3, 2), loader("tensor")).benchmark_batch_sizes([0])


@pytest.mark.parametrize("method", ["profile_backward_pass", "profile_memory"])
@pytest.mark.parametrize("loss", [None, F.cross_entropy])
def test_model_without_parameters_to_train_is_named(method, loss):
    profiler = quick(nn.Linear(3, 2).requires_grad_(False), loader("pair"), loss=loss)
    with pytest.raises(ValueError, match="the Linear has no parameter to train"):
        getattr(profiler, method)()


def test_empty_first_batch_is_named():
    with pytest.raises(ValueError, match="first batch is empty"):
        quick(nn.Linear(3, 2), loader("tensor", size=0)).run_full_profile()
    with pytest.raises(ValueError, match="first batch is empty"):
        quick(nn.Linear(3, 2), loader("tensor", size=0)).benchmark_batch_sizes([4])


# --- a step ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slept(tmp_path_factory):
    """A step whose parts sleep for 20, 40 and 60 ms, measured by the command line in this process."""
    folder = tmp_path_factory.mktemp("step")
    rests = ["--data-s", "0.02", "--delay-s", "0.04", "--backward-s", "0.06"]
    arguments = ["--task", SLEEPY, *TINY[2:], *rests, "--json", folder / "step.json", "--trace", folder / "trace"]
    started = time.perf_counter()
    save_dir = folder / "run"
    assert profile(["step", *map(str, arguments), *SHORT, "--save-dir", str(save_dir)]) == 0
    return {
        "result": json.loads((folder / "step.json").read_text()),
        "traces": list((folder / "trace").iterdir()),
        "seconds": time.perf_counter() - started,
        "save_dir": save_dir,
    }


def test_each_part_of_a_step_is_found_in_its_phase(slept):
    phases = slept["result"]["phases"]
    expected = {DATA: 20, FORWARD: 40, BACKWARD: 60}
    assert list(phases) == list(PHASES)
    for phase, least in expected.items():
        assert phases[phase]["ms_p10"] >= least, phase


def test_phases_add_up_to_the_step(slept):
    """The step is measured by the wall, the phases by their borders."""
    result = slept["result"]
    parts = [part["ms_mean"] for part in result["phases"].values()]
    assert sum(parts) == pytest.approx(result["step_ms_mean"], rel=0.1)
    assert sum(part["percent"] for part in result["phases"].values()) == pytest.approx(100)
    assert result["steps"] == 4
    assert result["samples_per_second"] == pytest.approx(8e3 / result["step_ms_mean"], rel=1e-6)
    assert result["step_ms_mean"] * 5 < 1e3 * slept["seconds"]
    assert len(result["ranks"]) == 1
    assert result["ranks"][0]["peak_memory_mib"] > 50


def test_trace_names_the_phases(slept):
    (path,) = slept["traces"]
    assert path.name.endswith(".pt.trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event.get("name") in PHASES and "dur" in event]
    assert {DATA, FORWARD, BACKWARD, "optimizer"} <= {span["name"] for span in spans}
    forward_us = [span["dur"] for span in spans if span["name"] == FORWARD]
    assert len(forward_us) >= 5 and max(forward_us) >= 40_000
    assert any(event.get("name", "").startswith("aten::") for event in events)


def test_save_dir_is_left_alone(slept):
    assert not slept["save_dir"].exists()


@pytest.fixture
def run():
    flags, problems = command.parse([*TINY, "--grad-accum-steps", "2"], False)
    assert not problems
    with opened(flags, TINY, SingleDevice(CPU), quiet=True) as run:
        yield run


def test_steps_are_those_of_the_loop_and_as_many_as_asked_for(run):
    """40 samples are 3 steps of 16, 16 and 8."""
    weights = [p.clone() for p in run.objective.parameters()]
    assert train_steps(run, 2) == 32
    assert train_steps(run, 4) == 40 + 16
    assert run.progress.step == 6
    assert not all(torch.equal(p, before) for p, before in zip(run.objective.parameters(), weights, strict=True))


def slow(function, seconds):
    def called(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return called


def test_clock_leaves_the_run_as_it_was(run):
    parallel, plain = run.parallel, run.parallel.phase
    run.log.start_epoch = slow(run.log.start_epoch, 0.05)
    with watched(run) as clock:
        started = time.perf_counter()
        clock.start()
        train_steps(run, 3)
        total, steps = clock.stop()
        wall_ms = 1e3 * (time.perf_counter() - started)
    assert parallel.phase is plain
    assert plain.step == clock.step == 3 and plain.name == clock.name
    assert not {"to_device", "start_sum", "gradient_sync"} & vars(parallel).keys()
    assert "step" not in vars(run.precision) and "step" not in vars(run.log)
    assert len(steps) == 3
    assert 0.8 * wall_ms < sum(total.values()) <= wall_ms
    assert sum(total.values()) == pytest.approx(sum(sum(step.values()) for step in steps))


def test_copy_optimizer_and_logging_are_told_apart(run):
    """The loop itself does not say where they end. The steps are of 2, 2 and 1 micro-batches."""
    optimizer = run.optimizers["train"]
    optimizer.step = slow(optimizer.step, 0.03)
    run.log.advance = slow(run.log.advance, 0.05)
    run.parallel.to_device = slow(run.parallel.to_device, 0.01)
    with watched(run) as clock:
        clock.start()
        train_steps(run, 3)
        total, _ = clock.stop()
    expected = {COPY: 50, OPTIMIZER: 90, REST: 150}
    # Time counts once, so that what is found in its phase is in no other.
    for phase, least in expected.items():
        assert total[phase] >= least, phase
    assert sum(total.values()) < sum(expected.values()) + 300


def test_accumulated_steps_are_single_steps(run):
    assert measure(run, 3, 1)["global_batch_size"] == 16
    assert measure(run, 3, 1)["steps"] == 3


def test_batch_beyond_the_data_is_told_as_what_it_is(profile_here, tmp_path):
    """There are 40 samples."""
    arguments = [*TINY, *SHORT, "--batch-size", "64", "--json", tmp_path / "step.json"]
    out = profile_here("step", *arguments).out
    result = json.loads((tmp_path / "step.json").read_text())
    assert (result["requested_global_batch_size"], result["global_batch_size"]) == (64, 40)
    assert result["samples_per_step"] == 40
    assert "\n4 steps of 40 samples: " in out
    assert "Steps of 64 samples were asked for; the training data has 40." in out


def test_samples_of_a_step_are_an_average_where_the_last_one_is_short(run):
    """40 samples are steps of 16, 16 and 8."""
    result = measure(run, 3, 1)
    assert result["samples_per_step"] == pytest.approx(40 / 3)
    assert "3 steps of 13.3 samples on average: " in step.report(result)
    assert result["samples_per_second"] == pytest.approx(1e3 * result["samples_per_step"] / result["step_ms_mean"])


def test_phases_of_several_processes_are_told_as_those_of_rank_0(run):
    result = measure(run, 2, 1)
    assert step.report(result).startswith("      ")
    assert step.report({**result, "ranks": 2 * result["ranks"]}).startswith("rank 0 ")


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.parametrize("start", [
    ["profiler.py", "step", "--multi-gpu", "ddp", "--nproc", "2"],
    [*TORCHRUN, "profiler.py", "step", "--multi-gpu", "ddp"],
])  # fmt: skip
@pytest.mark.slow
def test_step_of_two_processes(start, command, tmp_path):
    rests = ["--delay-s", "0.03", "--backward-s", "0.03"]
    out = command(
        *start, "--task", SLEEPY, *TINY[2:], *rests, *SHORT, "--json", tmp_path / "step.json",
        CUDA_VISIBLE_DEVICES="",
    ).stdout  # fmt: skip
    result = json.loads((tmp_path / "step.json").read_text())
    assert (result["world_size"], result["global_batch_size"], result["steps"]) == (2, 16, 4)
    assert out.count("DistributedDataParallel over gloo") == 1
    assert len(result["ranks"]) == 2
    for rank in result["ranks"]:
        phases = rank["phases_ms_mean"]
        assert phases[FORWARD] >= 30 and phases[BACKWARD] >= 25
        assert phases["communication"] > 0
        assert sum(phases.values()) == pytest.approx(rank["step_ms_mean"], rel=0.1)


def test_lost_process_of_a_measurement_is_not_said_to_go_on(alone):
    found = []
    flags, _ = command.parse([*TINY, "--multi-gpu", "ddp"], True, StepFlags)
    assert processes.on_devices(flags, alone, lambda parallel: found.append(parallel.diagnosis.has_checkpoints)) == 0
    assert found == [False]


def test_sigterm_ends_a_measurement_in_order():
    before, left = signal.getsignal(signal.SIGTERM), []

    def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            left.append("in order")

    assert processes.exit_status(work) == 128 + signal.SIGTERM
    assert left == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is before


# --- batch sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [7, 8, 9, 15, 16, 17, 100, 127, 128, 129, 1000, 1024, 5000])
def test_search_finds_the_limit_to_a_sixteenth(limit):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    largest, is_limit = search(fits, 8, 1024)
    assert len(set(tried)) == len(tried) < 14
    assert is_limit == (limit < 1024)
    if limit < 8:
        assert largest is None
    else:
        assert min(limit, 1024) * (1 - 1 / 16) - 1 <= largest <= min(limit, 1024)


def test_batch_size_command(profile_here, tmp_path):
    """A forward of 20 ms whatever the batch: the largest is the fastest. There are 40 samples, so no batch of 64."""
    arguments = [*ANY_BATCH, *SHORT, "--delay-s", "0.02", "--json", tmp_path / "sizes.json"]
    out = profile_here("batch-size", *arguments).out
    result = json.loads((tmp_path / "sizes.json").read_text())
    assert [row["batch_size"] for row in result["batch_sizes"]] == [8, 16, 32, 40]
    assert all(row["step_ms_median"] >= 20 and row["peak_memory_mib"] > 50 for row in result["batch_sizes"])
    assert (result["largest_batch_size"], result["larger_ones_do_not_fit"]) == (40, False)
    assert result["fastest_batch_size"] in (32, 40)
    assert out.splitlines()[-2].endswith("Largest: 40 (all training samples; all fit).")


def test_batch_size_command_says_that_the_data_bounds_the_smallest(profile_here):
    out = profile_here("batch-size", *ANY_BATCH, *SHORT, "--min-batch-size", "50", "--max-batch-size", "60").out
    assert "--min-batch-size 50: the training data has 40 samples; all are tried.\nbatch of 40: " in out


def test_batch_size_command_finds_the_limit_of_memory(profile_here, tmp_path):
    arguments = ["--task", SLEEPY, *ANY_BATCH[2:], *SHORT, "--room", "20", "--json", tmp_path / "sizes.json"]
    out = profile_here("batch-size", *arguments).out
    result = json.loads((tmp_path / "sizes.json").read_text())
    fits = {row["batch_size"]: row["fits"] for row in result["batch_sizes"]}
    assert fits == {size: size <= 20 for size in (8, 16, 20, 21, 22, 24, 32)}
    assert (result["largest_batch_size"], result["larger_ones_do_not_fit"]) == (20, True)
    assert "batch of 32: out of memory" in out


# --- scaling -----------------------------------------------------------------------------------------------------


def measured(samples_per_second, memory=(100.0,)):
    return {
        "samples_per_second": samples_per_second, "global_batch_size": 32, "requested_global_batch_size": 32,
        "step_ms_mean": 5.0,
        "phases": {"communication": {"ms_mean": 1.0}}, "ranks": [{"peak_memory_mib": m} for m in memory],
    }  # fmt: skip


def test_speedup_is_taken_within_rounds(tmp_path):
    """The machine was three times as slow in the first round."""
    found = {
        World("single"): [measured(30), measured(100), measured(100)],
        World("ddp", 2): [measured(54, (90.0, 120.0)), measured(180), measured(190)],
    }
    single, ddp = scaling.summary(found)
    assert (single["speedup"], single["efficiency"]) == (1, 1)
    assert (ddp["speedup"], ddp["efficiency"]) == (pytest.approx(1.8), pytest.approx(0.9))
    assert ddp["peak_memory_mib_per_process"] == 120
    assert scaling.report([single]).splitlines()[0].endswith("  peak MiB/process")
    assert re.search(r"ddp +2 +32 +180 +1\.80 +90%", scaling.report([single, ddp]))
    scaling.draw([single, ddp], tmp_path)
    board = EventAccumulator(str(tmp_path)).Reload()
    curve = board.Scalars("scaling/ddp/speedup")
    assert [(point.step, point.value) for point in curve] == [(1, 1), (2, pytest.approx(1.8))]
    assert board.Images("scaling/speedup")[0].encoded_image_string.startswith(b"\x89PNG")


def test_chart_shows_points_below_the_perfect_line():
    rows = [{"mode": "single", "num_devices": 1, "speedup": 1.0}, {"mode": "ddp", "num_devices": 4, "speedup": 2.0}]
    better = [rows[0], {**rows[1], "speedup": 4.0}]
    blue = (0, 114, 178)
    heights = [np.argwhere((draw_scaling(r) == blue).all(-1))[:, 0].min() for r in (rows, better)]
    assert heights[1] < heights[0] - 50


@pytest.fixture
def scaling_of(monkeypatch, profile_here):
    """Runs `profiler.py scaling` on the CPU with one result for each world, by its number of devices."""

    def run(results, *argv, **options):
        monkeypatch.setattr(scaling, "measure_world", lambda world, *_: results[world.num_devices])
        return profile_here("scaling", "--device", "cpu", "--rounds", "1", *argv, **options)

    return run


def test_scaling_says_where_the_data_bounds_the_batch(scaling_of):
    bounded = {**measured(150), "requested_global_batch_size": 64}
    out = scaling_of({1: measured(100), 2: bounded}).out
    assert "\nddp 2: Steps of 64 samples were asked for; the training data has 32.\n" in out
    assert "single: Steps" not in out


@pytest.mark.parametrize(("argv", "num_threads", "warns"), [
    ([], 4, True), ([], 1, False), (["--num-threads", "1"], 4, False),
])  # fmt: skip
def test_scaling_warns_of_one_process_on_all_cores(argv, num_threads, warns, scaling_of, monkeypatch):
    """OMP_NUM_THREADS=1 is as good as --num-threads 1."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    out = scaling_of({1: measured(100), 2: measured(150)}, *argv).out
    assert ("Without --num-threads 1" in out) == warns


@pytest.mark.slow
def test_scaling_command(command, tmp_path):
    arguments = [*TINY, *SHORT, "--delay-s", "0.05", "--rounds", "2", "--world-sizes", "1,2"]
    files = ["--json", tmp_path / "scaling.json", "--board", tmp_path / "board"]
    out = command("profiler.py", "scaling", *arguments, *files, CUDA_VISIBLE_DEVICES="").stdout
    single, ddp = json.loads((tmp_path / "scaling.json").read_text())["worlds"]
    assert "DataParallel needs at least two GPUs" in out
    assert (single["mode"], ddp["mode"], ddp["num_devices"]) == ("single", "ddp", 2)
    assert (single["global_batch_size"], ddp["global_batch_size"]) == (8, 16)
    assert 1.3 < ddp["speedup"] < 2.5  # sleeping does not need a core
    assert list((tmp_path / "board").iterdir())


# --- prediction --------------------------------------------------------------------------------------------------


def test_ring_takes_what_the_textbook_says():
    link = Link(latency_s=1e-5, bandwidth=1e9)
    assert link.all_reduce_s(1e8, 1) == 0
    assert link.all_reduce_s(1e8, 8) == pytest.approx(2 * 7 / 8 * 0.1 + 14 * 1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_link_is_recovered_from_what_it_takes(world_size):
    link = Link(latency_s=2e-5, bandwidth=3e9)
    found = Link.measured(link.all_reduce_s(0, world_size), link.all_reduce_s(10**8, world_size), 10**8, world_size)
    assert (found.latency_s, found.bandwidth) == (pytest.approx(2e-5), pytest.approx(3e9))


def test_only_what_backward_does_not_hide_is_waited_for():
    link = Link(latency_s=0, bandwidth=1e9)
    one = link.all_reduce_s(10**7, 4)
    hidden = predict(Compute(0.3, 0.2, [10**7, 10**7, 10**7]), link, 4)
    assert hidden.exchange_s == pytest.approx(3 * one)
    assert hidden.step_s == pytest.approx(0.3 + one)  # the last bucket
    exposed = predict(Compute(0.3, 0.001, [10**7, 10**7, 10**7]), link, 4)
    assert exposed.step_s == pytest.approx(0.3 + 3 * one - 0.001)
    assert predict(Compute(0.3, 0.2, [10**7]), link, 1).step_s == 0.3


def test_only_the_last_backward_hides_the_exchange():
    measured = {"step_ms_median": 20.0, "phases": {"backward": {"ms_median": 12.0}}, "gradient_bytes": [40, 2]}
    assert prediction.compute_of([measured], 4) == Compute(0.02, 0.003, [42])


def test_buckets_are_filled_from_the_last_gradient():
    assert buckets([100, FIRST_BUCKET_BYTES, 5]) == [FIRST_BUCKET_BYTES + 5, 100]
    assert buckets([7, 8]) == [15]
    assert buckets([]) == []
    sizes = [3 * 2**20] * 40
    assert sum(buckets(sizes)) == sum(sizes)
    assert buckets(sizes)[:2] == [3 * 2**20, 27 * 2**20]


def test_row_and_comparison():
    row = prediction.row(Compute(0.01, 0.004, [10**6]), Link(0, 1e9), 4, batch_size=32)
    assert row["step_ms"] == pytest.approx(10 + 1.5)
    assert row["samples_per_second"] == pytest.approx(4 * 32 / 0.0115)
    assert row["efficiency"] == pytest.approx(10 / 11.5)
    prediction.compare(row, [{"step_ms_median": 10.0}, {"step_ms_median": 23.0}, {"step_ms_median": 30.0}])
    assert (row["measured_step_ms"], row["error_percent"]) == (23, pytest.approx(-50))


def test_link_that_is_given_is_not_measured():
    """No process is started, which would take longer than the test."""
    argv = ["--device", "cpu", "--bandwidth-gb-s", "12", "--latency-us", "8"]
    flags, _ = command.parse(argv, False, PredictFlags)
    started = time.perf_counter()
    assert prediction.measured_link(flags, argv, World("ddp", 2)) == Link(8 / 1e6, 12e9)
    assert time.perf_counter() - started < 0.5


@pytest.mark.slow
def test_predict_command(command, tmp_path):
    """Of a step that mostly sleeps, which two processes do at once: there the model must be right."""
    arguments = [*TINY, "--steps", 20, "--delay-s", "0.1", "--rounds", "1", "--world-sizes", "2,8", "--validate"]
    out = command("profiler.py", "predict", *arguments, "--json", tmp_path / "p.json", CUDA_VISIBLE_DEVICES="").stdout
    result = json.loads((tmp_path / "p.json").read_text())
    two, eight = result["worlds"]
    assert result["bandwidth_gb_s"] > 0.01 and result["latency_us"] > 1
    assert two["step_ms"] <= eight["step_ms"]
    assert abs(two["error_percent"]) < 30
    assert "measured step ms" in out


# --- the machine -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """As one launched process."""
    return RankEnvironment(0, 1, 0, 1, f"file://{tmp_path}/meeting")


def test_check_of_this_machine(profile_here, alone, tmp_path):
    arguments = ["--device", "cpu", "--save-dir", tmp_path / "runs", "--json", tmp_path / "check.json"]
    profile_here("check", *arguments, environment=alone)
    findings = {f["subject"]: f for f in json.loads((tmp_path / "check.json").read_text())["findings"]}
    assert {
        "versions",
        "GPU",
        "disk",
        "shared memory",
        "open files",
        "loader, 2 workers",
        "exchange",
    } <= findings.keys()
    assert {finding["level"] for finding in findings.values()} <= {"OK", "warning"}
    assert "one process" in findings["exchange"]["text"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], TORCHRUN])
def test_check_of_two_processes(launcher, command):
    out = command(*launcher, "profiler.py", "check", "--device", "cpu", CUDA_VISIBLE_DEVICES="").stdout
    assert out.count("sums are right") == out.count(" disk: ") == 1


def test_wrong_sums_are_found():
    class Wrong(SingleDevice):
        def sum_in_place(self, values):
            values[-1] += 1

    assert sums_are_right(SingleDevice(CPU))
    assert not sums_are_right(Wrong(CPU))
    (finding,) = check.of_exchange(Wrong(CPU))
    assert finding.level == "BROKEN" and finding.advice


def test_disk_that_cannot_be_written_is_broken():
    finding = check.disk(Path("/proc/self/none"))
    assert (finding.level, finding.subject) == ("BROKEN", "disk")


def test_low_limit_of_open_files_is_warned_of():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        finding = check.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.level == "warning" and "256" in finding.text
    assert str(finding).startswith("warning  open files: at most 256; ulimit -n")


def test_check_of_a_broken_part_has_status_1(profile_here, alone):
    out = profile_here("check", "--device", "cpu", "--save-dir", "/proc/self/none", status=1, environment=alone).out
    assert "BROKEN   disk" in out


def test_check_of_processes_that_do_not_meet_has_status_1(profile_here, monkeypatch):
    """The other one of two never comes."""
    here = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))
    done = profile_here("check", "--device", "cpu", "--dist-timeout-s", "1", status=1)
    assert "BROKEN   exchange" in done.out
    assert "rank 1 of 2 could not meet the others" in done.err


def test_processes_that_leave_while_they_meet_are_told_of_in_one_line(alone, monkeypatch):
    def lost(self, value):
        raise RuntimeError("[third_party/gloo/pair.cc:553] Connection closed by peer\nmore")

    monkeypatch.setattr(Distributed, "gather", lost)
    try:
        with pytest.raises(BadInput, match=r"rank 0 of 1 could not meet .* --dist-timeout-s 5: .*by peer$"):
            Distributed(alone, MultiDeviceFlags("ddp", dist_timeout_s=5.0), DeviceFlags("cpu"))
    finally:
        torch.distributed.destroy_process_group()


def test_process_beside_the_first_of_its_host_says_why_it_failed(profile_here, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    beside = RankEnvironment(1, 2, 1, 2)
    done = profile_here("check", "--device", "cpu", "--dist-timeout-s", "1", environment=beside)
    assert done.out == ""
    assert done.err.startswith("error: rank 1 of 2 could not meet the others")


def test_exchange_is_not_kept_waiting_by_the_tests_of_a_machine(profile_here, alone, monkeypatch):
    monkeypatch.setattr(check, "of_this_machine", lambda tool: iter([check.Finding("OK", "disk", "slow")]))
    lines = profile_here("check", "--device", "cpu", environment=alone).out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["exchange:", "disk:"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_check_that_is_stopped_finds_nothing(number, profile_here, monkeypatch):
    sizes = []
    monkeypatch.setattr(check, "launch", lambda job, world_size: sizes.append(world_size) or 128 + number)
    assert "BROKEN" not in profile_here("check", "--device", "cpu", status=128 + number).out
    assert sizes == [2]


def test_process_that_crashes_in_the_exchange_is_broken(profile_here, monkeypatch):
    monkeypatch.setattr(check, "of_this_machine", lambda tool: iter([]))
    monkeypatch.setattr(check, "launch", lambda job, world_size: 128 + signal.SIGSEGV)
    assert profile_here("check", "--device", "cpu", status=1).out.count("BROKEN   exchange") == 1


# --- command lines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "messages"), [
    ([], ["nothing to measure"]),
    (["stpe"], ["stpe: no such command"]),
    (["step", "--steps", "0", "--epochs", "x", "--nonsense"],
     ["--steps 0: must be at least 1", "--epochs x: must be a whole number", "--nonsense: no such flag"]),
    (["step", "--eval-only"], ["--eval-only: profiler.py measures a training run"]),
    (["step", "--seeds", "3"], ["--seeds 3: profiler.py measures a training run"]),
    (["step", "--nproc", "2"], ["--multi-gpu: needs a value"]),
    (["batch-size", "--global-batch-size", "64", "--max-batch-size", "4"],
     ["--global-batch-size 64: leave it out", "--max-batch-size 4: must be at least --min-batch-size 8"]),
    (["batch-size", "--batch_size=64"], ["--batch-size 64: leave it out; batch-size varies the batch"]),
    (["batch-size", "--multi-gpu", "ddp"], ["--multi-gpu: batch-size measures one device"]),
    (["scaling", "--world-sizes", "1,0"], ["--world-sizes 0: must be at least 1"]),
    (["scaling", "--world-sizes", ""], ["--world-sizes: needs at least one value"]),
    (["predict", "--world-sizes", ""], ["--world-sizes: needs at least one value"]),
    (["predict", "--latency-us", "0", "--global-batch-size", "8"],
     ["--latency-us 0: must be above 0", "--global-batch-size 8: leave it out"]),
    (["scaling", "--nproc", "2"], ["--nproc 2: scaling chooses the number of processes"]),
    (["check", "--device", "cuda:1"], ["--device cuda:1: must be one of auto, cpu, cuda"]),
    (["check", "--task", "har"], ["--task: no such flag"]),
    (["check", "--backend", "mpi"], ["--backend mpi: must be one of nccl, gloo"]),
])  # fmt: skip
def test_every_mistake_is_one_line(argv, messages, profile_here):
    lines = profile_here(*argv, status=2).err.splitlines()
    assert len(lines) == len(messages)
    for message in messages:
        assert any(line.startswith(f"error: {message}") for line in lines), lines


def test_file_that_cannot_be_written(profile_here):
    err = profile_here("step", *TINY, *SHORT, "--json", "/proc/none/step.json", status=2).err
    assert err.startswith("error: --json /proc/none/step.json: ")


@pytest.mark.parametrize(("argv", "message"), [
    ("step --json {file}/x/step.json", "--json {file}/x/step.json: {file}: Not a directory; choose another file"),
    ("step --json {folder}", "--json {folder}: Is a directory; choose another file"),
    ("step --trace {file}", "--trace {file}: Not a directory; choose another folder"),
    ("batch-size --json {folder}", "--json {folder}: Is a directory; choose another file"),
    ("scaling --board {file}/board", "--board {file}/board: {file}: Not a directory; choose another folder"),
    ("predict --json {folder}", "--json {folder}: Is a directory; choose another file"),
    ("check --json /proc/x.json", "--json /proc/x.json: /proc: No such file or directory; choose another file"),
])  # fmt: skip
def test_results_that_cannot_be_written_are_told_before_measuring(argv, message, profile_here, tmp_path):
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    places["file"].write_text("kept")
    places["folder"].mkdir()
    task = [] if argv.startswith("check") else ["--task", WEIGHTED]
    done = profile_here(*argv.format(**places).split(), *task, "--device", "cpu", status=2)
    assert (done.out, done.err) == ("", f"error: {message.format(**places)}\n")
    assert places["file"].read_text() == "kept" and not list(places["folder"].iterdir())


def test_launcher_is_refused_where_processes_are_started(profile_here, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "scaling: starts its processes by itself" in profile_here("scaling", status=2).err


@pytest.mark.parametrize("argv", [["step", "--multi-gpu", "ddp", "--bogus"], ["scaling"], ["stpe"]])
@pytest.mark.parametrize(("local_rank", "count"), [("0", 1), ("1", 0), (None, 1)])
def test_one_process_of_a_launcher_tells_of_mistakes(argv, local_rank, count, profile_here, monkeypatch):
    around = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for variable, value in {**around, **({"LOCAL_RANK": local_rank} if local_rank else {})}.items():
        monkeypatch.setenv(variable, value)
    assert profile_here(*argv, status=2).err.count("error: ") == count


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_teaches(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["profiler.py"])
    with pytest.raises(SystemExit) as ended:
        profile([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: profiler.py {name} [flags]\n")
    assert "examples:" in out and f"python profiler.py {name}" in out
    assert "--json" in out and "--device" in out


def test_trace_is_not_said_to_be_for_tensorboard_alone(capsys, monkeypatch):
    """TensorBoard shows nothing of it without a package that is not among the requirements."""
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        profile(["step", "--help"])
    out = capsys.readouterr().out
    assert "tensorboard --logdir" not in out and "then: open the file in https://ui.perfetto.dev" in out
    assert "TensorBoard shows it only with the package torch-tb-profiler" in out


# --- documents ---------------------------------------------------------------------------------------------------

GROUPS: dict[str, type[FlagGroup]] = {
    "step": StepFlags, "scaling": ScalingFlags, "batch-size": BatchSizeFlags, "predict": PredictFlags,
    "check": CheckFlags,
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_reference_has_every_flag_with_its_default(name):
    section = reference("Profiler").split(f"\n### profiler.py {name}\n")[1].split("\n### ")[0]
    documented = {row[0].strip("`").split()[0]: row[1] for row in rows(section)}
    parser = build_parser([GROUPS[name]], "")
    assert {flag_name(field.name) for field in fields(GROUPS[name])} == documented.keys()
    for field in fields(GROUPS[name]):
        action = next(a for a in parser._actions if a.dest == field.name)
        expected = shown_default(field.default, action.nargs == 0)
        default = documented[flag_name(field.name)]
        assert ("(none)" if re.fullmatch(r"\(.+\)", default) else default.strip("`")) == expected, field.name


def documented_commands():
    texts = [path.read_text() for path in DOCUMENTS]
    blocks = [block for text in texts for block in code_blocks(text)]
    blocks += [re.sub(r" {3,}\S.*", "", about[1]) for about in (
        c.about if hasattr(c, "about") else check.ABOUT for c in command.COMMANDS.values()
    )]  # fmt: skip
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [line.split("profiler.py ", 1)[1].split("  #")[0].split() for line in lines if "profiler.py " in line]
    return [arguments for arguments in found if arguments[0] in GROUPS]


@pytest.mark.parametrize("arguments", documented_commands(), ids=" ".join)
def test_documented_command_parses(arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    name, *argv = arguments
    if "--help" in argv:
        return
    if name == "check":
        _, problems = command.parse_flags([CheckFlags], argv)
    else:
        several = command.names_several_devices(argv) or name in ("scaling", "predict")
        argv = [*argv, "--multi-gpu", "ddp"] if name in ("scaling", "predict") else argv
        _, problems = command.parse(argv, several, GROUPS[name])
    assert not problems


def test_documents_show_every_command():
    assert {arguments[0] for arguments in documented_commands()} == GROUPS.keys()
    assert LARGE_BYTES == 64 * 2**20  # as the documents say
