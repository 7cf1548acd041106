"""Tests `--data-on device`: results match data on the host, and unsuitable data are refused."""

import pytest

from tests.conftest import assert_same_bits, load
from tests.gpu.runs import assert_same, run
from tests.gpu.test_training import HELPERS
from tests.helpers import small_speech
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from trainer.commands import loaders

MOVABLE = f"{HELPERS / 'movable_task.py'}"
WEIGHTED = [
    "--task", f"{MOVABLE}:MovableWeighted", "--device", "cuda", "--epochs", 3, "--batch-size", 3,
    "--grad-accum-steps", 3, "--lr", 0.05, "--dropout", 0.2, "--amp", "off", "--deterministic",
]  # fmt: skip


@pytest.mark.parametrize("graphs", ["off", "on"])
@on_simulated_gpus()
def test_data_on_the_device_train_bit_identically_to_the_host(graphs, tmp_path, cache_dir):
    for place in ("host", "device"):
        flags = ["--cuda-graphs", graphs, "--data-on", place, "--save-dir", tmp_path / place]
        run(cache_dir, *WEIGHTED, *flags)
    assert_same_bits(*(load(tmp_path / place / "last.pth") for place in ("host", "device")))
    assert GPUS.printed().count("Data on cuda:0: train, val, test, ") == 1
    assert "without a graph" not in GPUS.printed()


@on_simulated_gpus()
def test_a_run_resumes_with_moved_data(tmp_path, cache_dir):
    constant = [*WEIGHTED, "--schedule", "constant", "--warmup-steps", 3]
    run(cache_dir, *constant, "--data-on", "host", "--save-dir", tmp_path / "whole")
    for num_epochs, place in ((1, "device"), (2, "host"), (3, "device")):
        run(cache_dir, *constant, "--data-on", place, "--epochs", num_epochs, "--save-dir", tmp_path / "resumed")
    assert_same_bits(*(load(tmp_path / name / "last.pth") for name in ("whole", "resumed")))


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(["har"], id="har", marks=pytest.mark.slow),
        pytest.param(["speech", *small_speech.SMALL], id="speech"),
    ],
)
@on_simulated_gpus()
def test_augmentation_on_the_gpu_matches_the_host(task, tmp_path, cache_dir):
    data = ["--data-dir", small_speech.write_digits(tmp_path / "data")] if task[0] == "speech" else []
    plain = ["--max-steps", 3, "--dropout", 0, "--device", "cuda", "--amp", "off", "--optimizer", "sgd"]
    for place in ("host", "device"):
        run(cache_dir, "--task", *task, *data, *plain, "--data-on", place, "--save-dir", tmp_path / place)
    assert_same(tmp_path / "host", tmp_path / "device", 1e-6)


@on_simulated_gpus()
def test_data_that_take_too_much_memory_stay_on_the_host(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setattr(loaders, "LARGEST_SHARE", 1e-9)
    run(cache_dir, *WEIGHTED, "--epochs", 1, "--save-dir", tmp_path / "run")
    assert "Data on the host: they would take more than" in GPUS.printed()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("HalfMovable", "--data-on device: moves only data of type trainer.Movable, not val (Sequences); use"),
        ("WrongWeights", "WrongSequences.weights: its values differ"),
    ],
)
@on_simulated_gpus()
def test_data_that_cannot_move_to_the_device_are_refused(name, message, tmp_path, cache_dir):
    settings = [*WEIGHTED, "--task", f"{MOVABLE}:{name}", "--data-on", "device", "--save-dir", tmp_path / "run"]
    run(cache_dir, *settings, status=2)
    assert message in GPUS.printed()


@on_simulated_gpus()
def test_movable_data_sets_move_beside_others(tmp_path, cache_dir):
    run(cache_dir, *WEIGHTED, "--task", f"{MOVABLE}:HalfMovable", "--epochs", 1, "--save-dir", tmp_path / "run")
    assert "Data on cuda:0: train, test, " in GPUS.printed()


@on_simulated_gpus()
def test_batches_on_the_gpu_begin_at_aligned_addresses():
    """Otherwise kernels could sum in another order than for a batch from the host."""
    import torch
    from torch.utils.data import TensorDataset

    from trainer.loading.on_device import DeviceLoader, moved
    from trainer.loading.order import SampleKeys
    from trainer.loading.torch_datasets import from_dataset

    device = torch.device("cuda", 0)

    def collate(samples, keys):
        return {**samples, "index": torch.from_numpy(keys.index), "weight": torch.ones(len(keys.index))}

    dataset = from_dataset(TensorDataset(torch.randn(9, 3), torch.arange(9)), seed=0, names=("x", "y"))
    loader = DeviceLoader(moved([dataset], device), collate, device)
    batches = list(loader(SampleKeys(torch.arange(i, i + 3).numpy(), epoch=0) for i in (0, 3, 6)))
    assert [batch["y"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(batch[name].data_ptr() % 16 == 0 for batch in batches for name in "xy")
