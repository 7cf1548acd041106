"""DataParallel matches one device. `ReplicasOnCpu` simulates it without GPUs."""

import pytest
import torch

from tests.conftest import largest_difference
from tests.helpers.replicas import ReplicasOnCpu, trained
from trainer.parallel.data_parallel import DataParallel
from trainer.parallel.strategy import SingleDevice


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_equal_one_device(num_replicas, tmp_path):
    """The run has accumulation, uneven chunks, and fewer samples than replicas at the end of an epoch."""
    same_batch = ("--global-batch-size", "12")
    one, test_one = trained(SingleDevice(torch.device("cpu")), tmp_path / "one", *same_batch)
    many, test_many = trained(ReplicasOnCpu(num_replicas), tmp_path / "many", *same_batch, "--batch-size", "2")
    assert largest_difference(one, many) < 1e-9
    assert test_many == pytest.approx(test_one, rel=1e-9)


def test_replicas_use_autocast_in_their_threads(tmp_path):
    state, _ = trained(ReplicasOnCpu(2), tmp_path / "amp", "--dtype", "float32", "--amp", "bf16", "--epochs", "1")
    plain, _ = trained(ReplicasOnCpu(2), tmp_path / "plain", "--dtype", "float32", "--epochs", "1")
    difference = largest_difference(state, plain)
    assert 0 < difference < 0.1


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, and -m cuda")
def test_real_data_parallel_equals_one_gpu(tmp_path):
    same_batch = ("--global-batch-size", "12")
    one, _ = trained(SingleDevice(torch.device("cuda", 0)), tmp_path / "one", *same_batch)
    two, _ = trained(DataParallel([torch.device("cuda", i) for i in (0, 1)]), tmp_path / "two", *same_batch)
    assert largest_difference(one, two) < 1e-9
