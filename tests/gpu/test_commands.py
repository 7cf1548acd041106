"""Tests prediction, frozen encoders, profiling and training from Python on simulated GPUs."""

import csv

import pytest
import torch
from torch import nn

import trainer
from profiler import PerformanceProfiler, compare_amp_performance
from profiler import main as profile
from tests.conftest import WEIGHTED, load
from tests.gpu.runs import EXACT, run
from tests.helpers.recordings import save_windows, windows_of_a_walk
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from tests.helpers.weighted_task import Weighted

HAR = ["--mode", "first", "--hidden-dims", 8, "--batch-size", 256, "--no-augmentation", "--max-steps", 2, *EXACT]
QUICK = ["--task", WEIGHTED, "--num-train", 40, "--steps", 2, "--settling-steps", 1, "--num-threads", 1]


@on_simulated_gpus(2)
def test_predict_labels_new_data_as_on_the_cpu(tmp_path, cache_dir):
    run(cache_dir, *HAR, "--device", "cpu", "--save-dir", tmp_path / "run")
    walk = save_windows(tmp_path / "walk.npy", windows_of_a_walk(cache_dir))
    for device in ("cuda:1", "cpu"):
        label = ["--predict", walk, "--save-dir", tmp_path / "run", "--device", device, *EXACT]
        run(cache_dir, *label, "--output", tmp_path / f"{device}.csv")
    tables = [list(csv.reader((tmp_path / f"{device}.csv").open())) for device in ("cuda:1", "cpu")]
    assert tables[0] == tables[1] and len(tables[0]) > 10


@pytest.mark.slow
@on_simulated_gpus(3)
def test_a_frozen_encoder_keeps_its_weights(tmp_path, cache_dir):
    run(cache_dir, *HAR, "--device", "cpu", "--save-dir", tmp_path / "first")
    encoder = tmp_path / "first" / "last.pth"
    run(cache_dir, *HAR, "--multi-gpu", "dp", "--encoder-path", encoder, "--freeze-encoder", "--global-batch-size", 258,
        "--save-dir", tmp_path / "second", several=True)  # fmt: skip
    before, after = (load(path)["model"] for path in (encoder, tmp_path / "second" / "last.pth"))
    same = {name: torch.equal(value, after[name]) for name, value in before.items() if value.dim() > 1}
    assert all(value for name, value in same.items() if "encoder" in name)
    assert not all(same.values())


@on_simulated_gpus(may_wait=True)
def test_the_profiler_measures_a_step(tmp_path, cache_dir):
    argv = ["step", *QUICK, "--batch-size", 8, "--device", "cuda"]
    for more in (["--trace", tmp_path / "trace"], ["--cuda-graphs", "on", "--steps", 6]):
        assert profile([*map(str, [*argv, *more]), "--cache-dir", str(cache_dir / "lockstep")]) == 0
    assert "forward" in GPUS.printed() and list((tmp_path / "trace").iterdir())
    assert GPUS.num_captures == 2 and GPUS.num_replays > 2 and "without a graph" not in GPUS.printed()


@pytest.mark.slow
@on_simulated_gpus(2, may_wait=True)
def test_the_profiler_checks_the_machine(tmp_path, cache_dir):
    assert profile(["check", "--device", "cuda", "--save-dir", str(tmp_path), "--backend", "gloo"]) in (0, 1)
    for line in ("GPU 0: Simulated GPU", "GPU 0 -> 1", "GPU 1 -> 0"):
        assert f"OK       {line}" in GPUS.printed() or f"warning  {line}" in GPUS.printed()


@pytest.mark.slow
@on_simulated_gpus(may_wait=True)
def test_the_profiler_measures_any_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    loss = nn.functional.cross_entropy
    found = PerformanceProfiler(model, batches, "cuda", loss=loss, repeats=2).run_full_profile()
    assert "cuda:0" in str(found)
    assert {"bf16", "fp16"} <= set(compare_amp_performance(model, batches, "cuda", loss=loss, repeats=2))
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.slow
@on_simulated_gpus(2)
def test_training_from_python_matches_the_cpu(tmp_path, cache_dir):
    settings = {"epochs": 1, "num_train": 24, "batch_size": 8, "lr": 0.01, "dtype": "float64", "num_threads": 1}
    metrics, _ = trainer.fit(Weighted, save_dir=tmp_path / "gpu", device="cuda:1", **settings)
    same, _ = trainer.fit(Weighted, save_dir=tmp_path / "cpu", device="cpu", **settings)
    assert metrics == pytest.approx(same)
    assert torch.cuda.current_device() == 0
