"""Tests that a run uses, and waits for, its own GPUs."""

from tests.helpers.simulated_gpu import on_simulated_gpus


@on_simulated_gpus(2)
def test_fetching_waits_for_its_own_gpu():
    """A copy that has not arrived would be [True, True]."""
    import torch

    from trainer.parallel.devices import queue_of

    assert torch.cuda.current_device() == 0
    arrived = queue_of(torch.device("cuda", 1)).fetch(torch.tensor([False, True], device="cuda:1"))
    assert arrived() == [False, True]


@on_simulated_gpus(3)
def test_the_first_gpu_is_the_current_device_in_every_form():
    """Code that names no GPU must not allocate memory or queue work on another GPU."""
    import torch

    from trainer.parallel.data_parallel import DataParallel
    from trainer.parallel.strategy import SingleDevice

    SingleDevice(torch.device("cuda", 2))
    assert torch.cuda.current_device() == 2
    DataParallel([torch.device("cuda", 1), torch.device("cuda", 2)])
    assert torch.cuda.current_device() == 1


@on_simulated_gpus(2)
def test_the_current_gpu_is_restored():
    import torch

    from trainer.api import process_restored
    from trainer.parallel.strategy import SingleDevice

    for before in (0, 1):
        torch.cuda.set_device(before)
        with process_restored():
            SingleDevice(torch.device("cuda", 1 - before))
        assert torch.cuda.current_device() == before
