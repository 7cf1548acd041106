"""A run that is out of memory continues with smaller micro-batches, and learns the same as with them from the start."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tasks.seqrec import SeqrecFlags, SeqrecTask
from tests.conftest import ROOT, assert_same_bits, largest_difference, launcher, load, read_metrics
from tests.helpers.forks import folder_of_world
from tests.helpers.processes import torchrun
from tests.helpers.replicas import ReplicasOnCpu, trained
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import Retention
from trainer.commands.build import build_run, build_task, set_up_torch
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.loading.batches import WeightedBatch
from trainer.loading.order import SampleKeys
from trainer.loop.memory import MEMORY, MemoryLimit, resplit
from trainer.parallel.ddp import Replicated
from trainer.parallel.process_group import ProcessGroup
from trainer.parallel.strategy import SingleDevice

CPU = torch.device("cpu")
TIGHT = f"{ROOT / 'tests' / 'helpers' / 'tight_task.py'}:Tight"
TINY = ["--task", TIGHT, "--epochs", 2, "--global-batch-size", 12, "--dtype", "float64", "--num-threads", 1,
        "--lr", 0.01, "--device", "cpu"]  # fmt: skip
LAST = "checkpoint_2.pth"


def memory_of(directory):
    return json.loads((directory / MEMORY).read_text())


def assert_same_learning(a, b):
    assert largest_difference(load(a / LAST), load(b / LAST)) < 1e-9
    results = [json.loads((directory / "results.json").read_text()) for directory in (a, b)]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], rel=1e-9)
    assert results[0]["step"] == results[1]["step"]
    for ours, theirs in zip(read_metrics(a, "epoch"), read_metrics(b, "epoch"), strict=True):
        assert ours.pop("event") == theirs.pop("event")
        assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.fixture(scope="module")
def small(tmp_path_factory, cache_dir):
    """Trains with 3 samples per forward pass; returns the run directory."""
    from trainer.cli import main

    directory = tmp_path_factory.mktemp("memory") / "small"
    arguments = [*TINY, "--batch-size", 3, "--save-dir", directory, "--cache-dir", cache_dir / "lockstep"]
    assert main([*map(str, arguments)], several_devices=False) == 0
    return directory


# --- one device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_is_redone_in_smaller_micro_batches(where, num_workers, small, run_here, tmp_path, monkeypatch):
    """The sixth forward pass is the first that lacks memory; its step already has gradients of one micro-batch."""
    directory = tmp_path / "run"
    monkeypatch.setenv("LOCKSTEP_RECORD", str(tmp_path))
    tight = ["--fit", 3, "--roomy-forwards", 5, "--tight-in", where, "--num-workers", num_workers]
    out, _ = run_here(*TINY, "--batch-size", 6, "--save-dir", directory, *tight)
    (line,) = [line for line in out.splitlines() if "emory" in line]
    assert line == (
        f"Out of memory in {where} at optimizer step 3 with 6 samples per forward pass: retrying with 3, and 4 "
        "accumulation steps instead of 2 for the same global batch of 12; in new runs, --batch-size 3 "
        "--global-batch-size 12 avoids such a failure."
    )
    assert_same_learning(directory, small)
    assert memory_of(directory)["batch_size"] == 3
    (record,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for epoch, num_redone in ((0, 6 if where == "forward" else 12), (1, 0)):
        received = [i for line in lines if line["epoch"] == epoch for i in line["index"]]
        assert set(received) == set(range(101))
        assert len(received) == 101 + num_redone


def test_micro_batches_are_halved_until_they_fit(small, run_here, tmp_path):
    out, _ = run_here(*TINY, "--batch-size", 12, "--fit", 1, "--save-dir", tmp_path)
    assert re.findall(r"with (\d+) samples per forward pass: retrying with (\d+)", out) == [
        ("12", "6"), ("6", "3"), ("3", "2"), ("2", "1")
    ]  # fmt: skip
    assert_same_learning(tmp_path, small)


def test_running_statistics_are_restored(run_here, tmp_path):
    """The forward pass updates the statistics before the backward pass runs out of memory."""
    args = [*TINY, "--batch-norm", "--epochs", 1]
    run_here(*args, "--batch-size", 3, "--save-dir", tmp_path / "small")
    run_here(*args, "--batch-size", 6, "--fit", 3, "--tight-in", "backward", "--save-dir", tmp_path / "tight")
    small, tight = load(tmp_path / "small" / "last.pth"), load(tmp_path / "tight" / "last.pth")
    assert any("running_mean" in name for name in small["model"])
    assert_same_bits({"model": small["model"]}, {"model": tight["model"]})


def test_a_found_memory_limit_is_remembered(run_here, tmp_path):
    """The next start uses the limit, unless --batch-size has changed."""
    args = [*TINY, "--batch-size", 12, "--save-dir", tmp_path]
    run_here(*args, "--fit", 3)
    out, _ = run_here(*args, "--fit", 3, "--epochs", 3)
    assert "Out of memory" not in out
    assert "At most 3 samples per forward pass, because more did not fit into the memory of cpu earlier." in out
    assert "(3 x 4 accumulation" in out
    out, _ = run_here(*args, "--fit", 6, "--batch-size", 6, "--epochs", 4)
    assert "Out of memory" not in out
    assert "(6 x 2 accumulation" in out


def test_a_single_sample_that_does_not_fit_is_refused(run_here, tmp_path):
    _, err = run_here(*TINY, "--fit", 0, "--save-dir", tmp_path, status=2)
    # 179 parameters with a gradient and two moments each, of 8 bytes.
    account = (
        "this model's parameters, gradients and moments take 0.0055 MiB of each device; --multi-gpu fsdp shards "
        "them, --grad-checkpointing stores fewer activations"
    )
    assert err.splitlines()[-1] == (
        "error: out of memory in forward at optimizer step 1 with a single sample per forward pass: a smaller "
        f"--batch-size cannot help; {account}; or use a smaller model, --amp bf16, or a device with more memory; "
        "earlier checkpoints are intact"
    )


def test_an_evaluation_out_of_memory_says_which_flag_to_lower(run_here, tmp_path):
    args = [*TINY, "--batch-size", 3, "--fit-eval", 2, "--save-dir", tmp_path]
    _, err = run_here(*args, "--eval-batch-size", 7, status=2)
    assert "out of memory in evaluation" in err and "with 7 samples per forward pass: use --eval-batch-size 4" in err
    out, _ = run_here(*args, "--eval-batch-size", 2)
    assert "Resuming after optimizer step" in out


def test_regrouping_keeps_every_sample_once_with_its_weight():
    batch = {"x": torch.arange(7), "weight": torch.tensor([1.0, 2, 0, 0, 5, 6, 7])}
    placeholder = WeightedBatch({"x": torch.tensor([9]), "weight": torch.zeros(1)}, 0.0, num_samples=0)
    window = [WeightedBatch(batch, 21.0, num_samples=7), placeholder]
    assert all(kept is whole for kept, whole in zip(resplit(window, 7), window, strict=True))
    parts = resplit(window, 2)
    assert [each.batch["x"].tolist() for each in parts] == [[0, 1], [2, 3], [4, 5], [6], [9]]
    assert [each.weight for each in parts] == [3.0, 0.0, 11.0, 7.0, 0.0]
    assert [each.num_samples for each in parts] == [2, 2, 2, 1, 0]


# --- DataParallel, simulated on the CPU --------------------------------------------------------------------------


def test_replicas_redo_a_step(tmp_path, monkeypatch):
    more = ("--global-batch-size", "12", "--task", TIGHT)
    small, small_test = trained(ReplicasOnCpu(2), tmp_path / "small", *more, "--batch-size", "2")
    tight = ("--batch-size", "6", "--fit", "2", "--roomy-forwards", "6")
    big, big_test = trained(ReplicasOnCpu(2), tmp_path / "big", *more, *tight)
    assert memory_of(tmp_path / "big")["batch_size"] == 2
    assert largest_difference(small, big) < 1e-9
    assert big_test == pytest.approx(small_test, rel=1e-9)


# --- several processes -------------------------------------------------------------------------------------------

IN_A_GROUP = ["--batch-size", 6, "--fit", 3, "--tight-rank", 1, "--roomy-forwards", 4, "--save-every-steps", 2]


@pytest.mark.slow
def test_a_self_launched_group_restarts(small, command, tmp_path):
    """`--fresh` applies only to the first start: the restart resumes."""
    directory = tmp_path / "run"
    (directory / "logs").mkdir(parents=True)
    argv = [*launcher(2), *TINY, *IN_A_GROUP, "--fresh", "--save-dir", directory]
    done = command(*argv, launched=True, CUDA_VISIBLE_DEVICES="")
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
        "error: rank 1 of 2 is out of memory in forward at optimizer step 5 with 6 samples per forward pass: the same "
        "command resumes from the last checkpoint with 3, and 2 accumulation steps instead of 1 for the same global "
        "batch of 12"
    ]
    assert "Traceback" not in done.stderr
    assert "Resuming after optimizer step 4" in done.stdout
    assert "(3 x 2 devices x 2 accumulation" in done.stdout
    assert_same_learning(directory, small)


@pytest.mark.slow
def test_torchrun_restarts_a_group(small, command, tmp_path):
    start = torchrun(2)
    start.insert(-3, "--max-restarts=2")
    done = command(*start, *TINY, *IN_A_GROUP, "--tight-in", "backward", "--save-dir", tmp_path)
    assert "Resuming after optimizer step 4" in done.stdout
    assert_same_learning(tmp_path, small)


# --- the dry run -------------------------------------------------------------------------------------------------


def built(strategy, directory, *more):
    argv = [*map(str, TINY), "--save-dir", str(directory), *more]
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    set_up_torch(flags, strategy.group)
    run_directory = RunDirectory(directory, Retention(3), print)
    run, _ = build_run(flags, build_task(flags), strategy, run_directory)
    return run


def test_a_dry_run_finds_the_size_and_leaves_nothing_behind(tmp_path):
    run = built(SingleDevice(CPU), tmp_path, "--batch-size", "12", "--fit", "4", "--tight-in", "backward")
    before = {name: value.clone() for name, value in run.learner.objective.state_dict().items()}
    state = torch.get_rng_state()
    run.memory.dry_run(run.task, run.plan, run.log.say)
    (batches,) = run.memory.splits
    assert (batches.batch_size, batches.grad_accum_steps, batches.global_batch_size) == (3, 4, 12)
    assert run.memory.limit.batch_size == 3
    assert_same_bits(before, run.learner.objective.state_dict())
    assert all(p.grad is None for p in run.learner.objective.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(optimizer.state for optimizer in run.learner.optimizers["train"])


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    ],
)
def test_out_of_memory_errors_of_libraries_are_recognised(message, tmp_path, monkeypatch):
    """The libraries raise plain RuntimeErrors. Any other RuntimeError is raised unchanged."""
    run = built(SingleDevice(CPU), tmp_path, "--batch-size", "12")
    forward = type(run.learner.objective).forward

    def short_of_memory(self, batch, phase="train"):
        if len(batch["index"]) > 3:
            raise RuntimeError(message)
        return forward(self, batch, phase)

    monkeypatch.setattr(type(run.learner.objective), "forward", short_of_memory)
    run.memory.dry_run(run.task, run.plan, run.log.say)
    assert run.memory.limit.batch_size == 3
    message = "CUDA error: an illegal memory access was encountered"
    run.memory.splits = tuple(replace(split, micro_batch_size=12) for split in run.memory.splits)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run.memory.dry_run(run.task, run.plan, run.log.say)


def test_a_dry_run_tries_the_last_epoch(tmp_path, monkeypatch):
    """Samples that grow from epoch to epoch are largest in the last epoch."""
    run = built(SingleDevice(CPU), tmp_path, "--fit", "4", "--epochs", "7")
    epochs = []

    def largest_samples(self, phase, epoch, count):
        epochs.append(epoch)
        return np.arange(count)

    monkeypatch.setattr(type(run.task), "largest_samples", largest_samples)
    run.memory.dry_run(run.task, run.plan, run.log.say)
    assert set(epochs) == {6}


def test_a_later_phase_is_split_although_the_first_has_a_single_sample(tmp_path, monkeypatch):
    """The largest micro-batch of the later phase has two samples, of which one fits."""
    argv = ["--task", "tests/helpers/phased_task.py:Shared", "--batch-size", "1", "--dtype", "float64"]
    flags, problems = parse([*argv, "--device", "cpu", "--save-dir", str(tmp_path)], several_devices=False)
    refuse(problems)
    run, _ = build_run(flags, build_task(flags), SingleDevice(CPU), RunDirectory(tmp_path, Retention(3), print))
    forward = type(run.learner.objective).forward

    def short_of_memory(self, batch, phase="first"):
        if phase == "second" and len(batch["index"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return forward(self, batch, phase)

    monkeypatch.setattr(type(run.learner.objective), "forward", short_of_memory)
    run.memory.dry_run(run.task, run.plan, run.log.say)
    assert [split.batch_size for split in run.memory.splits] == [1, 1]
    assert [split.global_batch_size for split in run.memory.splits] == [1, 2]


def dry_run_in_process(environment, folder, fails_early):
    torch.set_num_threads(1)
    flags = MultiDeviceFlags(multi_gpu="ddp", dist_timeout_s=20)
    strategy = Replicated(ProcessGroup(environment, flags, DeviceFlags(device="cpu")))
    run = built(strategy, folder / "run", "--batch-size", "6", "--fit", "3", "--tight-rank", "1")
    if environment.rank == 1 and fails_early:
        fail_before_the_first_forward(run)
    run.memory.dry_run(run.task, run.plan, run.log.say)
    run.learner.nets["train"](a_batch(run, environment.rank))["loss"].backward()
    strategy.exchange(run.learner.params["train"])
    gradient = torch.cat([p.grad.flatten() for p in run.learner.objective.parameters()])
    torch.save(
        {"batch_size": run.memory.splits[0].batch_size, "gradient": gradient}, folder / f"rank{environment.rank}"
    )
    strategy.group.close()
    return 0


def fail_before_the_first_forward(run):
    largest_samples = run.task.largest_samples

    def without_room(*args):
        run.task.largest_samples = largest_samples
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    run.task.largest_samples = without_room


def a_batch(run, sample):
    return next(iter(run.loaders["train"]([SampleKeys(np.array([sample]), 0)])))


@pytest.mark.parametrize("fails_early", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_dry_run_ends_equally_on_every_rank(fails_early, tmp_path):
    """The ranks can exchange gradients afterwards, and none waits for a rank that fails before its forward pass."""
    folder_of_world(functools.partial(dry_run_in_process, fails_early=fails_early), 2, tmp_path)
    first, second = (load(tmp_path / f"rank{rank}") for rank in range(2))
    assert first["batch_size"] == second["batch_size"] == 3
    assert torch.equal(first["gradient"], second["gradient"])
    assert first["gradient"].abs().max() > 0


def test_the_largest_samples_are_the_longest_histories(cache_dir):
    task = SeqrecTask(SeqrecFlags(maxlen=12), seed=0, cache_dir=cache_dir)
    dataset = task.splits()["train"]
    index = task.largest_samples("train", 0, 5)
    lengths = dataset.num_terms(np.arange(len(dataset)))
    assert len(index) == 5
    assert sorted(lengths[index]) == sorted(lengths)[-5:]


# --- memory.json -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", '{"device": "cpu"}',
        '{"device": "cpu", "asked_batch_size": 8, "batch_size": 0}',
        '{"device": "cpu", "asked_batch_size": 8, "batch_size": "4"}',
        '{"device": "another", "asked_batch_size": 8, "batch_size": 4}',
        '{"device": "cpu", "asked_batch_size": 16, "batch_size": 4}',
    ],
)  # fmt: skip
def test_a_memory_limit_of_other_settings_or_in_a_damaged_file_is_ignored(content, tmp_path):
    (tmp_path / MEMORY).write_text(content)
    unknown = MemoryLimit("cpu", asked_batch_size=8)
    assert unknown.remembered(tmp_path, print) == unknown


def test_a_memory_limit_is_remembered_for_its_settings(tmp_path):
    """The file is from an older version, which also wrote the batch size of evaluations."""
    found = '{"device": "cpu", "asked_batch_size": 8, "asked_eval_batch_size": null, "batch_size": 4}'
    (tmp_path / MEMORY).write_text(found)
    unknown = MemoryLimit("cpu", asked_batch_size=8)
    assert unknown.remembered(tmp_path, print).batch_size == 4
