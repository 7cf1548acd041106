"""A step with a non-finite loss or gradient changes nothing. The run stops, or continues without the batch."""

import dataclasses
import functools
import json
import math
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from tests.conftest import ROOT, assert_same_bits, cut_back, load, read_metrics
from tests.helpers.forks import folder_of_world
from tests.helpers.replicas import ReplicasOnCpu
from tests.helpers.replicas import trained as train_on_replicas
from trainer.cli import main
from trainer.loading.order import EpochOrder, Position
from trainer.logs.run_log import SilentLog
from trainer.loop.outcomes import StepOutcomes
from trainer.loop.plan import PlannedStep, ShuffledOrder
from trainer.loop.precision import SCALE_FLOOR, Precision, StepOutcome
from trainer.loop.progress import Progress
from trainer.loop.totals import Totals
from trainer.loop.watch import StepRecord
from trainer.parallel.devices import LAG_STEPS, DeviceQueue
from trainer.parallel.strategy import SingleDevice

CPU = torch.device("cpu")
TASK = f"{ROOT / 'tests' / 'helpers' / 'poisoned_task.py'}:Poisoned"
SIZE, NUM_TRAIN, EPOCH = 12, 101, 1
STEPS_PER_EPOCH = -(-NUM_TRAIN // SIZE)
POISONS = ("loss", "flat_loss", "gradient", "input")
BATCH = 4
"""The global batch of epoch 1 that is poisoned, counted from 0."""
STEP = EPOCH * STEPS_PER_EPOCH + BATCH + 1
NOT_FINITE = f"is not finite in optimizer step {STEP} (epoch {EPOCH + 1}), whose"
# Steps have at least 3 micro-batches, augmentation and dropout. The run averages weights and saves within epochs.
HARD = [
    "--task", TASK, "--epochs", 3, "--batch-size", 4, "--global-batch-size", SIZE, "--ema-decay", 0.9, "--lr", 0.01,
    "--dropout", 0.2, "--num-threads", 1, "--save-every-steps", 5, "--log-interval", 2, "--keep-checkpoints", 0,
]  # fmt: skip


def samples_of(batch: int, epoch: int = EPOCH) -> list[int]:
    return EpochOrder(0, epoch, 0, NUM_TRAIN).take(batch * SIZE, (batch + 1) * SIZE).tolist()


def shown(samples):
    return ",".join(map(str, samples))


ALL_BAD = (
    "--poisoned", shown(range(NUM_TRAIN)), "--poisoned-epoch", 0, "--batch-size", 1, "--global-batch-size", 1
)  # fmt: skip


def arguments(directory, *more):
    return [str(argument) for argument in (*HARD, "--save-dir", directory, *more)]


# Ranks take samples in turn: this sample belongs to rank 1 of 2, and to rank 0 of 3.
POISONED = ("--poisoned", samples_of(BATCH)[3])


@pytest.fixture
def trained(tmp_path, capsys, signals_restored):
    """Runs a command line in this process; returns (run directory, standard output, standard error)."""

    def run(name, *more, status=0):
        assert main(arguments(tmp_path / name, *more), several_devices=False) == status
        return tmp_path / name, *capsys.readouterr()

    return run


@pytest.fixture
def without_the_batch(trained):
    """Trains with global batches of weight 0, which take no step; returns the run directory."""

    def run(*batches, more=()):
        samples = [i for batch in batches or (BATCH,) for i in samples_of(batch)]
        return trained("without", "--poison", "absent", "--poisoned", shown(samples), *more)[0]

    return run


def assert_same_run(directory, other, skipped):
    """Asserts that two runs have the same state and metrics, except for the number of skipped steps."""
    for name in ("final.pth", "best.pth"):
        state, expected = load(directory / name), load(other / name)
        assert state["skipped_steps"] == (skipped if state["position"]["epoch"] > EPOCH else 0)
        for key in ("skipped_steps", "skipped_in_a_row", "config"):
            del state[key], expected[key]
        state["scores"].pop("train/skipped_steps", 0)
        assert_same_bits(state, expected)
    ours, theirs = read_metrics(directory, "epoch"), read_metrics(other, "epoch")
    assert [record.pop("train/skipped_steps", 0) for record in ours] == [0, skipped, skipped]
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.pop("event") == their.pop("event")
        assert mine == pytest.approx(their, rel=1e-12)


# --- the two policies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", POISONS)
def test_on_nonfinite_stop_names_the_step_and_does_not_save_it(poison, trained):
    directory, _, error = trained("run", *POISONED, "--poison", poison, status=2)
    assert len(error.splitlines()) == 1
    samples = samples_of(BATCH)
    cause = "the gradient" if poison == "gradient" else "the loss"
    assert error.startswith(f"error: training diverged: {cause} {NOT_FINITE}")
    assert f"global batch has {SIZE} samples: {', '.join(map(str, samples[:8]))} and 4 more" in error
    assert "--on-nonfinite skip" in error
    steps = [entry["step"] for entry in json.loads((directory / "manifest.json").read_text())["checkpoints"]]
    assert max(steps) == STEP - STEP % 5
    assert not (directory / "results.json").exists()
    assert all(value.isfinite().all() for value in load(directory / "last.pth")["model"].values())


@pytest.mark.parametrize("poison", POISONS)
def test_a_skipped_batch_leaves_no_trace_in_the_run(poison, trained, without_the_batch):
    directory, output, _ = trained("run", *POISONED, "--poison", poison, "--on-nonfinite", "skip")
    assert_same_run(directory, without_the_batch(), skipped=1)
    lines = [line for line in output.splitlines() if NOT_FINITE in line]
    assert len(lines) == 1
    assert lines[0].startswith("Skipped: ")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_an_overflow_seen_late_by_the_host_changes_nothing(policy, trained, without_the_batch, monkeypatch):
    """As on a GPU, the host does not wait for an outcome before the end of the epoch."""
    monkeypatch.setattr("trainer.loop.outcomes.queue_of", lambda device: DeviceQueue(LAG_STEPS))
    more = ("--save-every-steps", 0, "--log-interval", 1000)
    status = 2 if policy == "stop" else 0
    directory, output, error = trained("run", *POISONED, "--on-nonfinite", policy, *more, status=status)
    assert (output + error).count(NOT_FINITE) == 1
    if policy == "stop":
        assert load(directory / "last.pth")["step"] == EPOCH * STEPS_PER_EPOCH
    else:
        assert_same_run(directory, without_the_batch(more=more), skipped=1)


def test_data_parallel_skips_a_step_with_one_bad_replica(tmp_path):
    """Dropout is 0, because the threads of the replicas would draw from one generator in any order."""
    runs = {
        "run": (*POISONED, "--poison", "flat_loss", "--on-nonfinite", "skip"),
        "other": ("--poison", "absent", "--poisoned", shown(samples_of(BATCH))),
    }
    for name, more in runs.items():
        train_on_replicas(ReplicasOnCpu(2), tmp_path / name, *arguments(tmp_path / name, *more, "--dropout", 0))
    run, other = (load(tmp_path / name / "last.pth") for name in runs)
    assert (run["skipped_steps"], other["skipped_steps"]) == (1, 0)
    for key in ("model", "optimizers", "average_updates", "totals"):
        assert_same_bits({key: run[key]}, {key: other[key]})


def test_running_statistics_of_a_skipped_step_are_undone(trained, without_the_batch):
    more = ("--batch-norm", "--dropout", 0)
    directory, _, _ = trained("run", *POISONED, "--poison", "input", "--on-nonfinite", "skip", *more)
    assert_same_run(directory, without_the_batch(more=more), skipped=1)


def test_restarts_do_not_reset_the_limit_of_failures(trained, tmp_path):
    directory, _, _ = trained("run", *ALL_BAD, "--on-nonfinite", "skip", status=2)
    entries = json.loads((directory / "manifest.json").read_text())["checkpoints"]
    known = next(i for i, entry in enumerate(entries) if entry["step"] >= 30)
    cut_back(directory, entries[: known + 1], tmp_path / "killed")
    _, output, error = trained("killed", *ALL_BAD, "--on-nonfinite", "skip", status=2)
    assert output.count("Skipped: ") == 100 - entries[known]["step"]
    assert "the 100 steps before it were not finite either" in error


def test_a_resumed_run_continues_counting_skipped_steps(trained, without_the_batch, tmp_path):
    """The run is killed right after the first checkpoint that counts the bad batch."""
    directory, _, _ = trained("run", *POISONED, "--on-nonfinite", "skip")
    entries = json.loads((directory / "manifest.json").read_text())["checkpoints"]
    first = next(i for i, entry in enumerate(entries) if load(directory / entry["file"])["skipped_steps"] > 0)
    assert entries[first]["step"] == STEP - STEP % 5 + 5
    cut_back(directory, entries[: first + 1], tmp_path / "killed")
    killed, output, _ = trained("killed", *POISONED, "--on-nonfinite", "skip")
    assert f"Resuming after optimizer step {entries[first]['step']}:" in output
    assert_same_run(killed, without_the_batch(), skipped=1)


def test_overflowed_weights_are_not_saved(trained):
    """The loss and its gradient are finite, but the updated weights are not."""
    directory, _, error = trained("run", "--lr", 1e39, "--epochs", 1, "--global-batch-size", 101, status=2)
    assert "non-finite values in " in error and " after optimizer step 1" in error
    assert not list(directory.glob("*.pth"))


# --- many processes ----------------------------------------------------------------------------------------------


def run_all(environment, folder, command_lines):
    """Runs the command lines on one rank, and writes their output and exit status to files."""
    for name, argv in command_lines.items():
        place = dataclasses.replace(environment, init_method=f"{environment.init_method}-{name}")
        with (
            (folder / f"{name}-rank{environment.rank}.txt").open("w") as out,
            redirect_stdout(out),
            redirect_stderr(out),
        ):
            status = main(argv, several_devices=True, environment=place)
            out.write(f"\nstatus {status}\n")
    return 0


@pytest.fixture
def in_world(tmp_path):
    """Runs command lines on `world_size` processes; returns the output of each rank, by name."""

    def run(world_size, runs):
        command_lines = {
            name: ["--multi-gpu", "ddp", "--device", "cpu", *arguments(tmp_path / name, *more)]
            for name, more in runs.items()
        }
        folder_of_world(functools.partial(run_all, command_lines=command_lines), world_size, tmp_path)
        return {
            name: [(tmp_path / f"{name}-rank{rank}.txt").read_text() for rank in range(world_size)] for name in runs
        }

    return run


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.slow
def test_a_nonfinite_step_on_one_rank_is_skipped_on_all(world_size, in_world, tmp_path):
    cases = [("skip", poison) for poison in POISONS]
    runs = {"other": ("--poison", "absent", "--poisoned", shown(samples_of(BATCH)))}
    for policy, poison in [*cases, ("stop", "flat_loss")]:
        runs[f"{policy}-{poison}"] = (*POISONED, "--poison", poison, "--on-nonfinite", policy)
    outputs = in_world(world_size, runs)
    guilty = f"the loss of rank {3 % world_size}"
    for policy, poison in cases:
        main_output, *others = outputs[f"{policy}-{poison}"]
        cause = "the gradient of an unknown rank" if poison == "gradient" else guilty
        assert main_output.count(f"{cause} {NOT_FINITE}") == 1
        assert others == ["\nstatus 0\n"] * len(others)
        assert_same_run(tmp_path / f"{policy}-{poison}", tmp_path / "other", skipped=1)
    main_output, *others = outputs["stop-flat_loss"]
    assert f"error: training diverged: {guilty} {NOT_FINITE}" in main_output
    assert main_output.endswith("status 2\n")
    assert others == ["\nstatus 2\n"] * len(others)


# --- the parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_loss_poisons_gradients_and_a_finite_loss_changes_no_bit(bad, dtype):
    precision = Precision("off", dtype, CPU)
    torch.manual_seed(0)
    weight = torch.randn(50, dtype=dtype, requires_grad=True)
    (weight.sin().sum() + bad).backward()
    assert weight.grad.isfinite().all()  # without `Precision`, the gradient is finite
    weight.grad = None
    precision.backward(weight.sin().sum() + bad, 0.3)
    assert weight.grad.isnan().all()
    for loss in (0.0, -0.0, 1e30, -1e-30, 3.7):
        weight.grad = None
        precision.backward(weight.sin().sum() * 0 + loss + (weight.sin().sum() - weight.sin().sum().detach()), 0.3)
        (expected,) = torch.autograd.grad(weight.sin().sum(), weight, torch.tensor(0.3, dtype=dtype))
        assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_nonfinite_step_changes_neither_weights_nor_moments(max_grad_norm):
    torch.manual_seed(0)
    weights = [torch.randn(5, requires_grad=True), torch.randn(3, requires_grad=True)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    precision = Precision("off", torch.float32, CPU)

    def step(value):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        weights[1].grad[0] = value
        return precision.step([optimizer], weights, max_grad_norm)

    def everything():
        return [v.clone() for w in weights for v in (w.detach(), *optimizer.state[w].values())]

    step(1.0)
    before = everything()
    for value in (math.nan, math.inf, -math.inf, 3e38):  # the last is finite, its square is not
        outcome = step(value)
        assert not outcome.grad_norm.isfinite()
        assert (bool(outcome.applied), bool(outcome.alarm)) == (False, True)
        assert all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))
    step(1.0)
    assert not any(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))


def test_an_interrupted_update_can_be_repeated():
    precision = Precision("fp16", torch.float32, CPU)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    precision.backward(weight.sum() * 2, 1.0)
    precision.scaler.unscale_(optimizer)
    precision.forget_unscaling()
    weight.grad = None
    precision.backward(weight.sum() * 2, 1.0)
    precision.step([optimizer], [weight], 0.0)
    assert torch.equal(weight, torch.full((2,), -1.0))
    assert precision.scaler.get_scale() == 65536


def test_overflow_lowers_the_loss_scale_to_its_minimum():
    precision = Precision("fp16", torch.float32, CPU)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    alarms, scales = [], []
    for _ in range(20):
        precision.backward(weight.sum() * 2, 1.0)
        weight.grad.fill_(math.inf)
        outcome = precision.step([optimizer], [weight], 1.0)
        assert not outcome.grad_norm.isfinite()
        assert not outcome.applied
        alarms.append(bool(outcome.alarm))
        scales.append(precision.scaler.get_scale())
    halvings = int(math.log2(65536 / SCALE_FLOOR))
    assert alarms == [False] * halvings + [True] * (20 - halvings)
    assert scales == [max(65536 / 2 ** (i + 1), SCALE_FLOOR) for i in range(20)]
    assert torch.equal(weight, torch.ones(2))
    precision.backward(weight.sum() * 2, 1.0)
    precision.step([optimizer], [weight], 1.0)
    assert not torch.equal(weight, torch.ones(2))


def test_an_overflowing_norm_does_not_lower_the_loss_scale():
    """The gradients are finite, so a lower scale would not help."""
    precision = Precision("fp16", torch.float32, CPU)
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    precision.backward(weight.sum(), 1.0)
    weight.grad.fill_(3e38)
    precision.scaler.update(1.0)
    outcome = precision.step([optimizer], [weight], 1.0)
    assert (float(outcome.grad_norm), outcome.applied, bool(outcome.alarm)) == (math.inf, False, True)
    assert torch.equal(weight, torch.ones(4))


def test_a_step_without_gradients_does_not_use_the_scaler():
    """The loss may depend on no parameter that its phase trains."""
    precision = Precision("fp16", torch.float32, CPU)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    outcome = precision.step([optimizer], [weight], 1.0)
    assert (outcome.applied, outcome.alarm, float(outcome.grad_norm)) == (True, False, 0.0)
    assert precision.scaler.get_scale() == 65536
    precision.backward(weight.sum() * 2, 1.0)
    assert precision.step([optimizer], [weight], 1.0).applied


def test_sums_exclude_steps_that_were_not_applied():
    """There are more steps than are folded at once, with sums of several shapes and dtypes."""
    totals, expected = Totals(), Totals()
    for i in range(150):
        bad = i % 7 == 3
        applied = torch.tensor(not bad)
        totals.add({"loss": torch.tensor(math.inf if bad else 0.5 * i), "hits": torch.tensor([i, 1])}, 2.0, applied)
        if not bad:
            expected.add({"loss": torch.tensor(0.5 * i), "hits": torch.tensor([i, 1])}, 2.0)
    for each in (totals, expected):
        each._fold()
    assert {name: value.tolist() for name, value in totals._sums.items()} == {
        name: value.tolist() for name, value in expected._sums.items()
    }


def record(step, alarm):
    zero, applied = torch.tensor(0.0), torch.tensor(not alarm)
    planned = PlannedStep(0, 0, 0, 1, Position(), 0.0)
    return StepRecord(step, planned, ShuffledOrder(0, 0, 1, 1, 1), {"loss": zero}, StepOutcome(zero, applied, ~applied))


class Skips(SilentLog):
    """Records which steps are reported as skipped, and when."""

    def __init__(self):
        self.found = {}
        self.now = 0

    def say(self, text):
        self.found[int(re.search(r"optimizer step (\d+) ", text)[1])] = self.now


@pytest.mark.parametrize("lag", [0, LAG_STEPS])
def test_every_alarm_is_reported_once_and_in_order(lag, monkeypatch):
    monkeypatch.setattr("trainer.loop.outcomes.queue_of", lambda device: DeviceQueue(lag))
    outcomes, progress, log = StepOutcomes(SingleDevice(CPU), ["train"], "skip", ""), Progress(), Skips()
    bad = [1, 31, 32, 70, 99]
    for log.now in range(100):
        outcomes.after_step(progress, record(log.now, log.now in bad), log)
    outcomes.settle(log)
    assert [*log.found] == bad and progress.skipped_steps == len(bad)
    outcomes.settle(log)
    assert progress.skipped_steps == len(bad)
    if not lag:
        assert all(when == step for step, when in log.found.items())
    else:  # a group is read when the next group is full
        assert log.found == {1: 2 * LAG_STEPS - 1, 31: 2 * LAG_STEPS - 1, 32: 3 * LAG_STEPS - 1, 70: 99, 99: 99}
