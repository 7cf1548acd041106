"""Tests the memory use of averaged weights and snapshots, and the measurement of peak memory."""

from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus


@on_simulated_gpus()
def test_evaluating_and_saving_the_average_need_no_second_model():
    """The limit of two layers is below the memory for gradients, so an evaluation fits if the dry run fits."""
    import torch
    from torch import nn

    from trainer.loop.ema import ExponentialMovingAverage

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to("cuda")
    average = ExponentialMovingAverage(model, 0.5)
    with torch.no_grad():
        model[0].weight.add_(1)
    weight, kept = model[0].weight.detach().clone(), average._average[model[0].weight].clone()
    in_use = GPUS.memory_in_use()
    torch.cuda.reset_peak_memory_stats()
    with average.applied():
        assert torch.equal(model[0].weight, kept)
    assert torch.equal(model[0].weight, weight) and torch.equal(average._average[model[0].weight], kept)
    assert torch.cuda.max_memory_allocated() - in_use <= 2 * weight.nbytes


@on_simulated_gpus(2)
def test_peak_memory_is_that_of_the_fullest_gpu():
    import torch

    from trainer.profiling.meters import MIB, forget_peak, peak_memory_mib

    devices = [torch.device("cuda", i) for i in (0, 1)]
    held = [torch.zeros((1, 3)[i] * MIB, dtype=torch.uint8, device=device) for i, device in enumerate(devices)]
    assert peak_memory_mib(*devices) == 3
    del held
    forget_peak(*devices)
    assert peak_memory_mib(*devices) == 0


@on_simulated_gpus()
def test_a_snapshot_works_without_pinned_memory():
    import torch

    from trainer.checkpoint.background import snapshot

    empty_like = torch.empty_like

    def refusing(*args, pin_memory=False, **settings):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty_like(*args, **settings)

    torch.empty_like = refusing
    copy = snapshot({"weights": torch.arange(3.0, device="cuda")})["weights"]
    assert copy.tolist() == [0, 1, 2] and not copy.is_pinned()
