"""Tests sharpness-aware minimisation (SAM) on a simulated GPU."""

from tests.conftest import largest_difference, load
from tests.gpu.runs import run
from tests.gpu.test_training import HELPERS
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus


@on_simulated_gpus()
def test_matches_the_cpu_without_graphs(tmp_path, cache_dir):
    task = ["--task", f"{HELPERS / 'jobs.py'}:Sam", "--max-steps", 6, "--global-batch-size", 6, "--batch-size", 3]
    for device, more in (("cpu", []), ("cuda", ["--cuda-graphs", "on"])):
        own = ["--device", device, "--num-threads", 1, "--log-interval", 100, "--save-dir", tmp_path / device, *more]
        run(cache_dir, *task, *own)
    assert largest_difference(*(load(tmp_path / device / "last.pth") for device in ("cpu", "cuda"))) < 1e-9
    assert GPUS.num_replays == 0
    assert "CUDA graphs: steps with `joint_loss` or --sam-rho run without a graph." in GPUS.printed()
