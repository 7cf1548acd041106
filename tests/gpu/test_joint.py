"""Tests losses that couple all rows of a step (`joint_loss`) on simulated GPUs."""

import pytest

from tests.conftest import largest_difference, load
from tests.gpu.runs import EXACT, run
from tests.gpu.test_ranks import run_on_ranks
from tests.gpu.test_training import HELPERS
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus

CLIP = [
    "--task", f"{HELPERS / 'joint_task.py'}:Clips", "--epochs", 2, "--global-batch-size", 12, "--lr", 0.1,
    "--warmup-epochs", 0, "--num-threads", 1,
]  # fmt: skip


def assert_same(a, b, closeness=1e-9):
    """Asserts that weights are equal up to rounding. Evaluation losses depend on the size of evaluation batches."""
    assert largest_difference(load(a / "last.pth"), load(b / "last.pth")) < closeness


@on_simulated_gpus()
def test_matches_the_cpu_without_graphs(tmp_path, cache_dir):
    for device, more in (("cpu", []), ("cuda", ["--cuda-graphs", "on"])):
        run(cache_dir, *CLIP, *EXACT, "--batch-size", 5, "--device", device, "--save-dir", tmp_path / device, *more)
    assert_same(tmp_path / "cuda", tmp_path / "cpu")
    assert GPUS.num_replays == 0
    assert "CUDA graphs: steps with `joint_loss` or --sam-rho run without" in GPUS.printed()


@on_simulated_gpus()
def test_gradients_scaled_for_fp16_match_those_of_a_loss_in_forward(tmp_path, cache_dir):
    """`ClipsOfABatch` computes the loss in `forward`; `Clips` uses `joint_loss`, with one or several forward passes."""
    for name, task, size in (("whole", "ClipsOfABatch", 12), ("one", "Clips", 12), ("several", "Clips", 5)):
        own = ["--task", f"{HELPERS / 'joint_task.py'}:{task}", *CLIP[2:], "--batch-size", size]
        run(cache_dir, *own, "--amp", "fp16", "--device", "cuda", "--save-dir", tmp_path / name)
    assert_same(tmp_path / "one", tmp_path / "whole", 1e-6)
    assert_same(tmp_path / "several", tmp_path / "whole", 0.02)


@pytest.mark.slow
@on_simulated_gpus(2)
def test_ranks_match_the_cpu(tmp_path, cache_dir):
    run_on_ranks(tmp_path, cache_dir, *CLIP, *EXACT, "--batch-size", 2)
    run(cache_dir, *CLIP, *EXACT, "--batch-size", 12, "--device", "cpu", "--save-dir", tmp_path / "cpu")
    assert_same(tmp_path / "ranks", tmp_path / "cpu")


@on_simulated_gpus(2, may_wait=True)
def test_a_forward_pass_with_gather_is_not_captured(tmp_path, cache_dir):
    task = ["--task", f"{HELPERS / 'joint_task.py'}:Gathers", *CLIP[2:], "--amp", "off"]
    (tmp_path / "graphed").mkdir()
    run_on_ranks(tmp_path / "graphed", cache_dir, *task, "--batch-size", 6, "--cuda-graphs", "on")
    assert "trainer.gather runs a collective" in GPUS.printed()
    run(cache_dir, *task, "--batch-size", 12, "--device", "cpu", "--save-dir", tmp_path / "cpu")
    assert_same(tmp_path / "graphed" / "ranks", tmp_path / "cpu", 1e-4)
