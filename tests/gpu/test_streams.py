"""Tests training on a stream of samples on a simulated GPU."""

from tests.conftest import largest_difference, load
from tests.gpu.runs import run
from tests.gpu.test_training import HELPERS
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus


@on_simulated_gpus()
def test_matches_the_cpu_with_and_without_workers(tmp_path, cache_dir):
    task = ["--task", f"{HELPERS / 'jobs.py'}:Streamed", "--epochs", 3, "--batch-size", 6, "--num-threads", 1]
    # The run with workers is first, because workers must be forked before this process uses CUDA.
    for name, more in (("workers", ["--num-workers", 2]), ("cuda", []), ("cpu", [])):
        device = "cpu" if name == "cpu" else "cuda"
        run(cache_dir, *task, "--device", device, "--log-interval", 100, "--save-dir", tmp_path / name, *more)
        assert ("Workers: 2" if more else "Workers: 0") + " per rank" in GPUS.printed()
    expected, *others = (load(tmp_path / name / "last.pth") for name in ("cpu", "cuda", "workers"))
    assert all(largest_difference(expected, other) < 1e-9 for other in others)
    assert "workers see the old value" not in GPUS.printed()
