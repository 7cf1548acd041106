"""Tests that nn.DataParallel does not wait for a GPU when batches contain features of a frozen encoder."""

from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus


@on_simulated_gpus(2)
def test_data_parallel_does_not_wait_for_a_gpu_with_features(tmp_path):
    import torch

    from tasks.har import HarFlags, HarTask
    from tasks.har_objective import features_of
    from trainer.parallel.data_parallel import DataParallel

    strategy = DataParallel([torch.device("cuda", 0), torch.device("cuda", 1)])
    objective = HarTask(HarFlags(mode="first", hidden_dims=(8,)), 0, tmp_path).build_objective().to("cuda")
    signals = torch.randn(4, 9, 128).to("cuda")
    with torch.no_grad():
        features = features_of(objective.model, signals)
    batch = {"signals": signals, "features": features, "label": torch.zeros(4, dtype=torch.int64).to("cuda")}
    net = strategy.wrap(objective)
    GPUS.forget_mistakes()
    for _ in range(2):
        assert net(batch)["loss"].shape == ()
    assert not GPUS.waits
