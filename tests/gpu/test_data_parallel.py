"""Tests `--multi-gpu dp` with torch's own nn.DataParallel on three simulated GPUs."""

import pytest

from tests.gpu.runs import EXACT, assert_same, run, tiny
from tests.gpu.test_memory import ROOM, WIDE
from tests.gpu.test_training import BAD_FIRST_EPOCH, HELPERS
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus

CASES = {
    "two of three": ["--gpu-ids", "1,2", "--batch-size", 4, "--num-train", 25],  # the last batch is a single sample
    "accumulation": pytest.param(["--batch-size", 2, "--ema-decay", 0.9], marks=pytest.mark.slow),
}
DP = ["--multi-gpu", "dp"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@on_simulated_gpus(3)
def test_matches_the_cpu(case, tmp_path, cache_dir):
    more = [*EXACT, "--global-batch-size", 12, *case]
    tiny(cache_dir, tmp_path / "dp", *DP, *more, several=True)
    assert "DataParallel on cuda:" in GPUS.printed()
    of_one = [word for word in map(str, more) if word not in ("--gpu-ids", "1,2")]
    tiny(cache_dir, tmp_path / "cpu", *of_one, "--device", "cpu")
    assert_same(tmp_path / "dp", tmp_path / "cpu")


@pytest.mark.slow
@on_simulated_gpus(3)
def test_supported_precisions(tmp_path, cache_dir):
    for amp in ("bf16", "fp16"):
        tiny(cache_dir, tmp_path / amp, *DP, "--amp", amp, "--batch-size", 3, several=True)
        assert f"float32 with {amp} autocast" in GPUS.printed()


@pytest.mark.slow
@on_simulated_gpus(3)
def test_a_nonfinite_step_ends_training(tmp_path, cache_dir):
    run(cache_dir, *DP, *BAD_FIRST_EPOCH, "--num-train", 24, "--batch-size", 3, "--save-dir", tmp_path, status=2,
        several=True)  # fmt: skip
    assert "the loss is not finite" in GPUS.printed()


@pytest.mark.slow
@on_simulated_gpus(3)
def test_outputs_per_sample_match_the_cpu(tmp_path, cache_dir):
    task = ["--task", f"{HELPERS / 'scored_task.py'}:Scored", "--epochs", 2, "--global-batch-size", 6, *EXACT]
    run(cache_dir, *DP, *task, "--batch-size", 2, "--save-dir", tmp_path / "dp", several=True)
    run(cache_dir, *task, "--device", "cpu", "--save-dir", tmp_path / "cpu")
    assert_same(tmp_path / "dp", tmp_path / "cpu")


@on_simulated_gpus(3)
def test_a_batch_too_large_for_one_gpu_is_made_smaller(tmp_path, cache_dir):
    GPUS.limit_memory(ROOM // 3, device=2)
    tiny(cache_dir, tmp_path / "dp", *DP, *WIDE, "--batch-size", 16, several=True)
    assert "16 samples per forward pass do not fit into memory: training with " in GPUS.printed()
    tiny(cache_dir, tmp_path / "cpu", *WIDE, "--device", "cpu")
    assert_same(tmp_path / "dp", tmp_path / "cpu")


@pytest.mark.slow
@on_simulated_gpus(1)
def test_a_single_gpu_needs_no_replicas(tmp_path, cache_dir):
    tiny(cache_dir, tmp_path, *DP, several=True)
    assert "found one: training on cuda:0" in GPUS.printed()
