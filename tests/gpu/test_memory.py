"""Tests that a run adapts its batches to the memory of a GPU without a change of its results."""

import pytest

from tests.conftest import TINY, WEIGHTED
from tests.gpu.runs import EXACT, assert_same, run, tiny
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from trainer.loop.memory import MemoryGuard

KIB = 2**10
WIDE = ["--width", 64, "--num-train", 96, "--num-val", 64, "--global-batch-size", 48, "--batch-size", 48, *EXACT]
ROOM = 500 * KIB
"""Bytes of GPU memory that suffice for a forward and backward pass on 24 samples, but not on 48."""


@on_simulated_gpus()
def test_the_dry_run_finds_what_fits(tmp_path, cache_dir):
    GPUS.limit_memory(ROOM)
    tiny(cache_dir, tmp_path / "tight", *WIDE, "--device", "cuda", "--eval-batch-size", 8)
    GPUS.limit_memory(2**30)
    tiny(cache_dir, tmp_path / "roomy", *WIDE, "--device", "cuda", "--eval-batch-size", 8)
    assert "48 samples per forward pass do not fit into memory: training with 24" in GPUS.printed()
    assert_same(tmp_path / "tight", tmp_path / "roomy")


@on_simulated_gpus()
def test_a_step_out_of_memory_is_retried(tmp_path, cache_dir):
    """The memory limit starts after the dry run, as if another process had then taken memory."""
    dry_run = MemoryGuard.dry_run

    def then_memory_gets_short(*arguments):
        dry_run(*arguments)
        GPUS.limit_memory(ROOM)

    MemoryGuard.dry_run = then_memory_gets_short
    tiny(cache_dir, tmp_path / "tight", *WIDE, "--device", "cuda", "--eval-batch-size", 8)
    MemoryGuard.dry_run = dry_run
    GPUS.limit_memory(2**30)
    tiny(cache_dir, tmp_path / "roomy", *WIDE, "--device", "cuda", "--eval-batch-size", 8)
    assert "Out of memory in backward at optimizer step 1 with 48 samples per forward pass" in GPUS.printed()
    assert_same(tmp_path / "tight", tmp_path / "roomy")


@pytest.mark.slow
@on_simulated_gpus()
def test_too_little_memory_for_a_single_sample_is_reported(tmp_path, cache_dir):
    dry_run = MemoryGuard.dry_run

    def without_memory(*arguments):
        GPUS.limit_memory(GPUS.memory_in_use() + KIB)
        dry_run(*arguments)

    MemoryGuard.dry_run = without_memory
    run(cache_dir, "--task", WEIGHTED, *WIDE, "--device", "cuda", "--save-dir", tmp_path, status=2)
    assert "with a single sample per forward pass" in GPUS.printed()


@on_simulated_gpus()
def test_out_of_memory_for_the_first_samples_is_reported(tmp_path, cache_dir):
    """The weights fit into memory, but not together with the activations of two samples."""
    width = 4000
    GPUS.limit_memory(25 * width * 8)  # weights take 11 of 25, activations of 2 x 5 time steps 10 per layer
    run(cache_dir, *TINY, "--width", width, *EXACT, "--device", "cuda", "--save-dir", tmp_path, status=2)
    assert "with 2 samples per forward pass: try --batch-size 1" in GPUS.printed()


@pytest.mark.slow
@on_simulated_gpus()
def test_a_run_leaves_no_tensors_on_the_gpu(tmp_path, cache_dir):
    import gc

    tiny(cache_dir, tmp_path, "--device", "cuda")
    gc.collect()
    assert GPUS.memory_in_use() == 0
