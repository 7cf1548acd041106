"""Products with a table that pairs look up, against the rows looked up one pair at a time; and dropout on them."""

import pytest
import torch

from models.sequential import intervals
from models.sequential.intervals import Pairs, interval_logits, interval_sums
from models.sequential.tisasrec import IntervalAttention

BATCH, QUERIES, KEYS, ROWS, WIDTH = 3, 4, 5, 7, 6

pytestmark = pytest.mark.usefixtures("double_precision")


def make(heads):
    """Rows that many pairs share, and two that none looks up."""
    pairs = Pairs(torch.randint(0, ROWS - 2, (BATCH, QUERIES, KEYS)), ROWS)
    query = torch.randn(BATCH, heads, QUERIES, WIDTH, requires_grad=True)
    weight = torch.rand(BATCH, heads, QUERIES, KEYS, requires_grad=True)
    table = torch.randn(heads, ROWS, WIDTH, requires_grad=True)
    return pairs, query, weight, table


def looked_up(table, pairs):
    """(batch, heads, queries, keys, width)."""
    return table[:, pairs.row].transpose(0, 1)


@pytest.fixture(params=[True, False], ids=["bags", "products"])
def form(request, monkeypatch):
    monkeypatch.setattr(intervals, "_in_bags", lambda x: request.param)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("heads", [1, 2])
def test_values_and_gradients_are_those_of_rows_looked_up(heads):
    pairs, query, weight, table = make(heads)
    rows = looked_up(table, pairs)
    for found, expected, x in (
        (interval_logits(query, table, pairs), (query.unsqueeze(3) * rows).sum(-1), query),
        (interval_sums(weight, table, pairs), (weight.unsqueeze(-1) * rows).sum(3), weight),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        probe = torch.randn_like(expected)
        gradients = torch.autograd.grad(found, (x, table), probe)
        expected_gradients = torch.autograd.grad(expected, (x, table), probe, retain_graph=True)
        torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-12)
        assert (gradients[1][:, -2:] == 0).all() and gradients[1].abs().max() > 0.1


@pytest.mark.usefixtures("form")
def test_one_table_in_several_products_gets_all_gradients():
    pairs, query, weight, table = make(1)
    rows = looked_up(table, pairs)
    found = interval_logits(query, table, pairs).sum() + interval_sums(weight, table, pairs).square().sum()
    expected = (query.unsqueeze(3) * rows).sum() + (weight.unsqueeze(-1) * rows).sum(3).square().sum()
    inputs = (query, weight, table)
    torch.testing.assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs))


def test_bags_compute_in_single_precision_under_autocast():
    pairs, query, weight, table = (x.float() if isinstance(x, torch.Tensor) else x for x in make(2))
    with torch.autocast("cpu", torch.bfloat16):
        logits = interval_logits(query.bfloat16(), table, pairs)
        sums = interval_sums(weight.bfloat16(), table, pairs)
    rows = looked_up(table, pairs)
    torch.testing.assert_close(logits, (query.bfloat16().float().unsqueeze(3) * rows).sum(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(sums, (weight.bfloat16().float().unsqueeze(-1) * rows).sum(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("product", [interval_logits, interval_sums])
def test_dropout_has_the_mean_and_variance_of_dropping_elements_of_each_pairs_rows(product):
    draws, p = 5_000, 0.3
    attention = IntervalAttention(WIDTH, 2, p)
    pairs, query, weight, table = make(2)
    x = (query if product is interval_logits else weight).detach()
    table = table.detach()
    found = torch.stack([attention.dropped(product, x, table, pairs) for _ in range(draws)])
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
    torch.testing.assert_close(attention.eval().dropped(product, x, table, pairs), product(x, table, pairs))


def test_dropout_has_gradients_where_all_is_zero():
    attention, (pairs, query, _, table) = IntervalAttention(WIDTH, 1, 0.2), make(1)
    dropped = attention.dropped(interval_logits, query * 0, table, pairs)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(dropped.sum(), (query, table)))
