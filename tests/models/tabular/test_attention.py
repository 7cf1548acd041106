"""Tests every path of attention against one query and one head at a time."""

import math

import pytest
import torch
from torch import Tensor

from models.tabular import attention
from models.tabular.attention import attend

pytestmark = pytest.mark.usefixtures("double_precision")


def one_by_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    outputs = torch.empty_like(query)
    for s, t, head in ((s, t, h) for s, row in enumerate(query) for t, q in enumerate(row) for h in range(len(q))):
        keys = range(key.shape[1]) if mask is None else mask[s, 0, 0].nonzero().flatten().tolist()
        weights = [torch.exp(query[s, t, head] @ key[s, k, head] / math.sqrt(query.shape[-1])) for k in keys]
        values = [w * value[s, k, head] for w, k in zip(weights, keys, strict=True)]
        outputs[s, t, head] = sum(values) / sum(weights)
    return outputs


@pytest.fixture(params=["plain products", "fused"])
def path(request, monkeypatch):
    if request.param == "fused":
        monkeypatch.setattr(attention, "_FEW_KEYS", 0)


@pytest.mark.parametrize("masked", [False, True])
def test_equals_one_query_at_a_time_with_gradients(path, masked):
    query, key, value, weights = (torch.randn(5, length, 2, 4) for length in (3, 6, 6, 3))
    mask = None
    if masked:
        mask = (torch.arange(6) < torch.tensor([6, 1, 4, 2, 5])[:, None])[:, None, None]
    results = []
    for form in (attend, one_by_one):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        outputs = form(*leaves, mask)
        results.append((outputs, *torch.autograd.grad((outputs * weights).sum(), leaves)))
    for value, reference in zip(*results, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-12)


def test_huge_logits_give_finite_losses(path):
    query, key = 1e4 * torch.randn(2, 3, 1, 4), torch.randn(2, 6, 1, 4)
    assert attend(query, key, key).isfinite().all()
