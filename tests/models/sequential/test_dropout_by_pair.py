"""benchmarks/dropout_by_pair.py against dropping elements of rows that were looked up."""

import pytest
import torch

from benchmarks.dropout_by_pair import AttentionDropsByPair, TiSASRecDropsByPair
from models.sequential.intervals import interval_logits, interval_sums
from models.sequential.tisasrec import IntervalAttention, TiSASRec
from tests.models.sequential.test_intervals import WIDTH, looked_up, make

pytestmark = pytest.mark.usefixtures("double_precision")


def make_attention(heads, p):
    return AttentionDropsByPair(IntervalAttention(WIDTH, heads, p))


@pytest.mark.parametrize("product", [interval_logits, interval_sums])
def test_dropout_has_the_mean_and_variance_of_dropping_elements_of_each_pairs_rows(product):
    draws, p = 5_000, 0.3
    attention = make_attention(2, p)
    pairs, query, weight, table = make(2)
    x = (query if product is interval_logits else weight).detach()
    table = table.detach()
    found = torch.stack([attention.noisy(product, x, table, pairs) for _ in range(draws)])
    rows = looked_up(table, pairs)
    kept = (torch.rand(draws, *rows.shape) >= p) / (1 - p)
    dropped = kept * rows
    expected = (x.unsqueeze(3) * dropped).sum(-1) if product is interval_logits else (x.unsqueeze(-1) * dropped).sum(4)
    mean, deviation = expected.mean(0), expected.std(0)
    assert deviation.min() > 0.01
    assert ((found.mean(0) - mean) / deviation).abs().max() < 6 * (2 / draws) ** 0.5
    torch.testing.assert_close(found.std(0), deviation, rtol=0.1, atol=0)
    independent = torch.corrcoef(found.flatten(1).T).fill_diagonal_(0)
    assert independent.abs().max() < 6 / draws**0.5, "two pairs share their noise"


def test_dropout_has_gradients_where_all_is_zero():
    attention, (pairs, query, _, table) = make_attention(1, 0.2), make(1)
    dropped = attention.noisy(interval_logits, query * 0, table, pairs)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(dropped.sum(), (query, table)))


def test_without_dropout_it_is_the_usual_model():
    size = (20, 8, 6, 2, 2, 0.0)
    model, usual = TiSASRecDropsByPair(*size), TiSASRec(*size)
    usual.load_state_dict(model.state_dict())
    items, times, length = torch.randint(1, 21, (3, 8)), torch.arange(24).view(3, 8), torch.tensor([8, 8, 8])
    for training in (True, False):
        states = [each.train(training).encode(items, length, times) for each in (model, usual)]
        torch.testing.assert_close(*states, rtol=0, atol=1e-5)
