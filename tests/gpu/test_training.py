"""Tests that training on one simulated GPU matches the CPU, and never waits for the GPU within a step."""

import json

import pytest

from tests.conftest import ROOT, assert_same_bits, cut_back, load, read_metrics
from tests.gpu.runs import EXACT, assert_same, run, tiny
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus

HELPERS = ROOT / "tests" / "helpers"
POISONED = ["--task", f"{HELPERS / 'poisoned_task.py'}:Poisoned", "--poisoned", 3, "--poison", "input"]
BAD_FIRST_EPOCH = [*POISONED, "--poisoned-epoch", 0]
SETTINGS = {
    "accumulation": ["--batch-size", 3, "--grad-accum-steps", 3, "--max-grad-norm", 0],
    "ema": pytest.param(["--ema-decay", 0.9, "--save-every-steps", 2], marks=pytest.mark.slow),
    "sgd with dropout": pytest.param(
        ["--optimizer", "sgd", "--momentum", 0.9, "--dropout", 0.3], marks=pytest.mark.slow
    ),
    "skipped step": [*POISONED, "--epochs", 2, "--on-nonfinite", "skip", "--batch-norm", "--ema-decay", 0.9],
}
TASKS = {
    "two phases": [f"{HELPERS / 'phased_task.py'}:Gan", "--eval-every-steps", 2],
    "outputs per sample": [f"{HELPERS / 'scored_task.py'}:Scored"],
    "batch norm": [f"{HELPERS / 'normed_task.py'}:Normed"],
    "running scale": [f"{HELPERS / 'stateful_task.py'}:ScaledLocallyTask", "--grad-checkpointing"],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@on_simulated_gpus()
def test_matches_the_cpu(settings, tmp_path, cache_dir):
    for device in ("cuda", "cpu"):
        tiny(cache_dir, tmp_path / device, "--device", device, "--log-interval", 2, *EXACT, *settings)
    assert_same(tmp_path / "cuda", tmp_path / "cpu")


@on_simulated_gpus(2)
def test_other_tasks_match_the_cpu_on_the_second_gpu(tmp_path, cache_dir):
    for name, task in TASKS.items():
        for device in ("cuda:1", "cpu"):
            run(cache_dir, "--epochs", 2, "--batch-size", 4, *EXACT, "--device", device,
                "--save-dir", tmp_path / name / device, "--task", *task)  # fmt: skip
        assert_same(tmp_path / name / "cuda:1", tmp_path / name / "cpu")


@on_simulated_gpus()
def test_results_of_many_steps_match_the_cpu(tmp_path, cache_dir):
    """80 steps exceed LAG_STEPS and FOLD_EVERY, so results are fetched and sums are folded within the epoch."""
    more = ["--num-train", 80, "--batch-size", 1, "--log-interval", 1000, *EXACT]
    for device in ("cuda", "cpu"):
        tiny(cache_dir, tmp_path / device, "--device", device, *more)
    assert_same(tmp_path / "cuda", tmp_path / "cpu")


@on_simulated_gpus(may_wait=True)
def test_optimizers_that_make_the_host_wait_match_the_cpu(tmp_path, cache_dir):
    """`Sparse` has an optimizer for sparse gradients, `OwnOptimizers` has optimizers without fused kernels."""
    for name in ("Sparse", "OwnOptimizers"):
        for device in ("cuda", "cpu"):
            run(cache_dir, "--task", f"{HELPERS / 'token_task.py'}:{name}", "--epochs", 1, "--batch-size", 18, *EXACT,
                "--device", device, "--save-dir", tmp_path / name / device)  # fmt: skip
        assert_same(tmp_path / name / "cuda", tmp_path / name / "cpu")
    assert any(wait.in_step for wait in GPUS.waits)


@on_simulated_gpus()
def test_an_own_optimizer_that_reads_found_inf_never_makes_the_host_wait(tmp_path, cache_dir):
    """Steps that are not finite change nothing."""
    task = ["--task", f"{HELPERS / 'poisoned_task.py'}:PoisonedDescent", *POISONED[2:], "--epochs", 2]
    for device in ("cuda", "cpu"):
        tiny(cache_dir, tmp_path / device, "--device", device, "--on-nonfinite", "skip", *EXACT, *task)
    assert_same(tmp_path / "cuda", tmp_path / "cpu")


@on_simulated_gpus()
def test_supported_precisions(tmp_path, cache_dir):
    more = ["--num-train", 101, "--log-interval", 5, "--save-every-steps", 5]
    tiny(cache_dir, tmp_path / "cpu", "--device", "cpu", *more)
    for amp in ("bf16", "fp16", "off"):
        state = tiny(cache_dir, tmp_path / amp, "--device", "cuda", "--amp", amp, *more)
        loss, expected = (read_metrics(tmp_path / name, "epoch")[-1]["train/loss"] for name in (amp, "cpu"))
        assert loss == pytest.approx(expected, abs=1e-5 if amp == "off" else 0.03)
        assert bool(state["scaler"]) == (amp == "fp16")


@pytest.mark.slow
@on_simulated_gpus(capability=(7, 5))
def test_an_older_gpu_computes_in_fp16(tmp_path, cache_dir):
    tiny(cache_dir, tmp_path, "--device", "auto")
    assert "float32 with fp16 autocast" in GPUS.printed()


@on_simulated_gpus()
def test_a_nonfinite_step_ends_training(tmp_path, cache_dir):
    for amp in ("off", "bf16"):
        run(cache_dir, *BAD_FIRST_EPOCH, "--num-train", 24, "--batch-size", 8, "--device", "cuda", "--amp", amp,
            "--save-dir", tmp_path / amp, status=2)  # fmt: skip
    assert GPUS.printed().count("training diverged: the loss is not finite in optimizer step 1 (epoch 1)") == 2


@on_simulated_gpus()
def test_a_step_that_overflows_fp16_is_skipped(tmp_path, cache_dir):
    """One of three steps overflows and halves the loss scale."""
    state = tiny(cache_dir, tmp_path, *BAD_FIRST_EPOCH, "--device", "cuda", "--amp", "fp16")
    assert state["scaler"]["scale"] == 2**15
    assert "Skipped" not in GPUS.printed()


@on_simulated_gpus()
def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path, cache_dir):
    settings = ["--device", "cuda", "--amp", "fp16", "--batch-size", 4, "--epochs", 2, "--deterministic",
                "--ema-decay", 0.9, "--save-every-steps", 4, "--keep-checkpoints", 0]  # fmt: skip
    tiny(cache_dir, tmp_path / "unbroken", *settings)
    entries = json.loads((tmp_path / "unbroken" / "manifest.json").read_text())["checkpoints"]
    cut_back(tmp_path / "unbroken", [entry for entry in entries if entry["step"] <= 8], tmp_path / "resumed")
    tiny(cache_dir, tmp_path / "resumed", *settings)
    assert_same_bits(*(load(tmp_path / name / "last.pth") for name in ("unbroken", "resumed")))


@on_simulated_gpus()
def test_eval_only_scores_a_finished_run(tmp_path, cache_dir):
    for more in (["--device", "cuda"], ["--device", "cuda", "--eval-only"], ["--device", "cpu", "--eval-only"]):
        tiny(cache_dir, tmp_path, *EXACT, *more)
    lines = [line.partition("test/")[2] for line in GPUS.printed().splitlines() if "test/accuracy" in line]
    assert len(lines) == 3 and len(set(lines)) == 1, lines
