"""Tests batch loading for a GPU: the choice of worker processes, pinned memory and prefetching."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, TINY, assert_same_bits, load
from tests.gpu.runs import run, tiny
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from tests.helpers.simulated_gpu.ranks import run_ranks
from tests.helpers.weighted_task import Sequences, Weighted, WeightedFlags
from trainer.commands import loaders
from trainer.loading.order import SampleKeys
from trainer.loading.workers import BatchLoader, Workers
from trainer.parallel import group, process_group, strategy

HELPERS = ROOT / "tests" / "helpers"
SLEEPY = ["--task", f"{HELPERS / 'sleepy_task.py'}:Sleepy", "--data-s", 0.01]
COUNTING = ["--task", f"{HELPERS / 'counting_task.py'}:Counting", "--data-s", 0.01]
LONG = [
    "--num-train",
    96,
    "--batch-size",
    2,
    "--epochs",
    1,
    "--dropout",
    0.2,
    "--device",
    "cuda:0",
    "--num-workers",
    "auto",
]
HERE = "Workers: none; the training process loads batches, because "


def told() -> list[str]:
    return [line.split("] ")[-1] for line in GPUS.printed().splitlines() if "Workers: " in line]


@on_simulated_gpus()
def test_slow_data_get_workers_and_stay_bit_identical(tmp_path, cache_dir):
    """The trainer keeps one of three cores. One evaluation is in the middle of the epoch, the last one at its end."""
    group.usable_cores = lambda: range(3)
    assert not torch.cuda.is_initialized()
    found = tiny(cache_dir, tmp_path / "auto", *SLEEPY, *LONG, "--eval-every-steps", 25)
    start, decision = told()
    assert "Workers: 2 per rank, used only if the first steps show that they save time. Threads: 1 " in start
    assert decision.startswith("Workers: a batch takes ") and "so 2 process(es) load batches from now on" in decision
    assert torch.cuda.is_initialized() and not multiprocessing.active_children()
    expected = tiny(cache_dir, tmp_path / "here", *SLEEPY, *LONG, "--eval-every-steps", 25, "--num-workers", 0)
    assert_same_bits(found, expected)


@pytest.mark.slow
@on_simulated_gpus()
def test_batches_too_large_for_shared_memory_are_made_in_process(tmp_path, cache_dir):
    group.usable_cores, loaders.shared_memory = lambda: range(9), lambda: 16 * 200
    tiny(cache_dir, tmp_path / "run", *SLEEPY, *LONG)
    assert told()[1:] == [f"{HERE}two batches per worker would not fit into /dev/shm."]


@on_simulated_gpus()
def test_fast_data_are_loaded_in_process(tmp_path, cache_dir):
    group.usable_cores = lambda: range(9)
    tiny(cache_dir, tmp_path / "run", *LONG, "--delay-s", 0.02)
    start, decision = told()
    assert "Workers: 8 per rank" in start
    assert decision.startswith(f"{HERE}a batch takes ") and "ms to train on" in decision
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("holds", "why"),
    [
        ("counts", "Counted.counts changes, which worker processes would not see."),
        pytest.param(
            "connection", "worker processes may be unable to share SleepySequences.connection.", marks=pytest.mark.slow
        ),
    ],
)
@on_simulated_gpus()
def test_data_that_must_not_be_copied_stay_in_the_process(holds, why, tmp_path, cache_dir):
    group.usable_cores = lambda: range(2)
    tiny(cache_dir, tmp_path / "auto", *COUNTING, *LONG, "--holds", holds)
    assert told()[1:] == [HERE + why]


@on_simulated_gpus()
def test_num_workers_starts_workers_but_never_forks_a_process_with_cuda(tmp_path, cache_dir):
    counting = [*COUNTING, *LONG, "--max-minutes", 9, "--num-workers", 2]
    first = tiny(cache_dir, tmp_path / "first", *counting)
    start, changed = told()
    assert "Workers: 2 per rank. " in start
    start_of_remark = "Workers: Counted.counts changed, but workers see the old value; "
    assert changed == f"{start_of_remark}if batches depend on it, set --num-workers 0."
    assert_same_bits(first, tiny(cache_dir, tmp_path / "second", *counting))
    assert "Workers: 0 per rank. " in told()[2]
    assert told()[3:] == [f"{HERE}this process already uses CUDA, so it cannot fork workers."]


@on_simulated_gpus()
def test_batches_wait_in_pinned_memory_until_they_were_copied():
    """Loading reports no mistakes; a change of a batch before it was copied is detected."""
    collate, data = Weighted(WeightedFlags(), 0, Path()).collate, [Sequences(40, 0, True)]
    keys = [SampleKeys(np.arange(i, i + 4), epoch=1) for i in range(0, 40, 4)]
    expected = list(BatchLoader(data, collate)(keys))
    several = {number: BatchLoader(data, collate, Workers(number, for_gpu=True)) for number in (1, 0)}
    for loader in several.values():
        sent, early = [], []
        for batch in loader(keys):
            assert all(tensor.is_pinned() for tensor in batch.values())
            sent.append({name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()})
        assert all(
            torch.equal(own["features"].cpu(), other["features"]) for own, other in zip(sent, expected, strict=True)
        )
        assert not [mistake for mistake in GPUS.mistakes() if "changed" in mistake]
        for batch in loader(keys[:1]):
            early.append(batch["features"].to("cuda", non_blocking=True))
            batch["features"].zero_()
        assert any("changed before it is known to have been copied" in mistake for mistake in GPUS.mistakes())
        GPUS.forget_mistakes()
        loader.close()


@on_simulated_gpus()
def test_sparse_batches_train_to_the_same_weights(tmp_path, cache_dir):
    group.usable_cores = lambda: range(3)
    flags = ["--batch-size", 1, "--epochs", 3, "--num-workers", "auto", "--device", "cuda", "--num-threads", 1]
    for name in ("Sparse", "Distil"):
        task = f"{HELPERS / 'distilling_task.py'}:{name}"
        run(cache_dir, "--task", task, *flags, "--save-dir", tmp_path / name)
    assert " ms to train on" in told()[1]
    sparse, dense = (load(tmp_path / name / "final.pth")["model"] for name in ("Sparse", "Distil"))
    assert [*map(torch.equal, sparse.values(), dense.values())] == [True, True]


@on_simulated_gpus()
def test_prefetching_changes_nothing(tmp_path, cache_dir):
    """Runs with SMALLEST_UPLOAD = 2**18 prefetch nothing. A batch is not prefetched if the GPU lacks memory for it."""
    found = []
    for strategy.SMALLEST_UPLOAD in (0, 2**18):
        for graphs in ("on", "off"):
            more = ["--device", "cuda", "--epochs", 2, "--dropout", 0.2, "--cuda-graphs", graphs, "--deterministic"]
            found.append(tiny(cache_dir, tmp_path / f"{strategy.SMALLEST_UPLOAD} {graphs}", *more))
    for other in found[1:]:
        assert_same_bits({"model": found[0]["model"]}, {"model": other["model"]})
    device = torch.device("cuda", 0)
    batch = {name: torch.ones(2**16).pin_memory() for name in ("features", "index", "weight")}
    assert [value.is_cuda for value in strategy.SingleDevice(device).upload(batch).values()] == [True, False, False]
    GPUS.limit_memory(GPUS.memory_in_use())
    assert strategy.SingleDevice(device).upload(batch) is batch


@pytest.mark.slow
@pytest.mark.parametrize(("binds_ranks", "num_workers"), [(False, 1), (True, 3)])
@on_simulated_gpus(2)
def test_each_rank_has_its_own_workers(binds_ranks, num_workers, tmp_path, cache_dir):
    process_group.usable_cores = lambda: range(first := 4 * binds_ranks * os.getpid(), first + 4)
    argv = [
        "--multi-gpu",
        "ddp",
        "--backend",
        "gloo",
        *TINY,
        *SLEEPY,
        *LONG,
        "--num-train",
        192,
        "--cache-dir",
        cache_dir,
    ]
    argv[argv.index("cuda:0")] = "cuda"
    assert run_ranks([*argv, "--save-dir", tmp_path / "run"], 2, tmp_path / "meeting") == [0, 0], GPUS.printed()
    start, decision = told()
    assert f"Workers: {num_workers} per rank, used only if " in start
    assert decision.endswith(f"so {num_workers} process(es) load batches from now on.")
