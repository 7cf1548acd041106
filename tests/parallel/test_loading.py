"""All ranks get the weights and moments of the checkpoint that rank 0 reads."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.helpers.forks import folder_of_world
from trainer.checkpoint.format import LARGE
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.parallel.ddp import Replicated
from trainer.parallel.process_group import ProcessGroup

WORLD_SIZE = 2


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model.counts = nn.Buffer(torch.full((4,), seed, dtype=torch.int16))  # gloo does not support this dtype
    model[2].weight.data = model[2].weight.data.T.contiguous().T  # a transposed memory layout
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.AdamW(model[2].parameters(), fused=True)]
    model(torch.randn(7, 3)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


def state_of(model, optimizers):
    return {"model": model.state_dict(), "optimizers": {"train": [each.state_dict() for each in optimizers]}}


def agreed_counts(strategy, model):
    """Returns counts that differ between ranks, after wrapping the model and after synchronizing its buffers."""
    model, found = deepcopy(model), []
    model.counts.fill_(strategy.group.rank)
    net = strategy.wrap(model)
    net(torch.randn(7, 3)).sum().backward()
    found.append(model.counts.tolist())
    model.counts.fill_(strategy.group.rank + 5)
    strategy.sync_tensors(dict(net.named_buffers()))
    found.append(model.counts.tolist())
    return found


def in_process(environment, folder):
    """Trains another model on each rank, and then loads on all of them what rank 0 reads."""
    strategy = Replicated(ProcessGroup(environment, MultiDeviceFlags(multi_gpu="ddp"), DeviceFlags(device="cpu")))
    model, optimizers = trained(seed=environment.rank)
    state = strategy.load_on_main(lambda: state_of(*trained(seed=7)) | {"step": 3, "sums": torch.ones(2)}, LARGE)
    sent = [state["model"]["0.weight"], state["optimizers"]["train"][0]["state"][0]["exp_avg"]]
    strategy.load_weights(state["model"], model)
    strategy.load_optimizer_states(state["optimizers"], {"train": optimizers}, torch.float32)
    moments = [optimizers[1].state[p]["exp_avg"] for p in model[2].parameters()]
    same_strides = [p.stride() == kept.stride() for p, kept in zip(model[2].parameters(), moments, strict=True)]
    found = state_of(model, optimizers) | {"step": state["step"], "sums": state["sums"], "same_strides": same_strides}
    found["travelled"] = [not value.is_meta for value in sent]
    if strategy.group.is_main:
        found["read"] = {name: state[name] for name in ("model", "optimizers")}
    found["agreed"] = agreed_counts(strategy, model)
    torch.save(found, folder / f"rank{environment.rank}.pt")
    strategy.group.close()
    return 0


def flat(value):
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flat(item)]
    if isinstance(value, list):
        return [tensor for item in value for tensor in flat(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loading")
    folder_of_world(in_process, WORLD_SIZE, folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


def test_every_rank_has_what_rank_0_read(found):
    expected = found[0]["read"]
    for own in found:
        assert own["step"] == 3 and own["same_strides"] == [True, True]
        assert torch.equal(own["sums"], torch.ones(2))
        tensors, wanted = (flat([each["model"], each["optimizers"]]) for each in (own, expected))
        assert len(tensors) == len(wanted) > 15
        assert all(map(torch.equal, tensors, wanted))


def test_buffers_of_any_dtype_come_from_rank_0(found):
    assert [own["agreed"] for own in found] == [[[0] * 4, [5] * 4]] * WORLD_SIZE


def test_large_tensors_do_not_travel_within_the_checkpoint(found):
    """A pickled checkpoint would be in the memory of each process several times."""
    assert [own["travelled"] for own in found] == [[True, True], [False, False]]
