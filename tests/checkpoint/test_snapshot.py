"""The copy that a save is written from: it keeps the moment, and what the state shares."""

import json

import pytest
import torch
from torch import nn

from trainer.checkpoint.background import snapshot, state_bytes


def test_a_snapshot_does_not_change_with_the_state():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizers": {"train": optimizer.state_dict()}, "step": 1, "best": None}
    before = json.dumps(snapshot(state), default=torch.Tensor.tolist)
    copy = snapshot(state)
    for tensor in [*model.state_dict().values(), *optimizer.state[model.weight].values()]:
        tensor.fill_(7)
    assert json.dumps(copy, default=torch.Tensor.tolist) == before
    assert copy["model"]._metadata == model.state_dict()._metadata


def test_a_snapshot_keeps_shared_tensors_shared_and_views_small():
    table = torch.zeros(100, 10)
    copy = snapshot({"a": table, "b": [table], "row": table[3], "other": torch.zeros(100, 10)})
    assert copy["a"].data_ptr() == copy["b"][0].data_ptr()
    assert copy["other"].data_ptr() != copy["a"].data_ptr()
    assert copy["row"].untyped_storage().nbytes() == 40
    assert state_bytes(copy) == 2 * 4000 + 40


def test_a_snapshot_uses_memory_again_where_it_fits():
    old = snapshot({"a": torch.zeros(10), "b": torch.zeros(10), "c": torch.zeros(3)})
    memory = {tensor.data_ptr() for tensor in (old["a"], old["b"])}
    state = {"a": torch.ones(10), "b": torch.full((10,), 2.0), "c": torch.ones(4), "d": torch.ones(10).double()}
    new = snapshot(state, old)
    assert {new["a"].data_ptr(), new["b"].data_ptr()} == memory
    assert all(torch.equal(new[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.tensor(3), torch.arange(6.0).view(2, 3).t(), torch.eye(3).to_sparse(), torch.ones(2) > 0],
)
def test_any_kind_of_tensor_is_copied(tensor):
    copy = snapshot({"x": tensor})["x"]
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    assert (copy.dtype, copy.layout) == (tensor.dtype, tensor.layout)
