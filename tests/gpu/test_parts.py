"""Tests that the parts of benchmarks/gpu.py run on a simulated GPU."""

import importlib

import pytest
import torch

from benchmarks.on_gpu import models, part
from benchmarks.on_gpu.part import Report, Setting
from tests.helpers.simulated_gpu import on_simulated_gpus

PARTS = ["machine", "exact", "poisoned", "snapshot", "resumed", "graphed", "loop", "throughput", "saving"]
"""Parts that neither fill the memory of a GPU, nor start processes, nor compile."""
MODELS = ("sasrec", "plmu")


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
@on_simulated_gpus(may_wait=True)
def test_a_benchmark_part_runs_on_a_simulated_gpu(name, tmp_path, cache_dir):
    torch.cuda._sleep = lambda cycles: None
    for other in models.MODELS.keys() - set(MODELS):
        del models.MODELS[other]
    (cache_dir / "lockstep").mkdir(exist_ok=True)
    (tmp_path / part.CACHE).symlink_to(cache_dir / "lockstep")
    setting = Setting("cuda", tmp_path / "part", is_small=True)
    setting.folder.mkdir()
    found = []
    importlib.import_module(f"benchmarks.on_gpu.{name}").measure(setting, Report(found.append))
    assert found
    assert not [each for each in found if each.get("holds") is False]
