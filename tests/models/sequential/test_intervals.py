"""Tests products with table rows that pairs look up against a lookup of one pair at a time."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from models.sequential import intervals
from models.sequential.intervals import Pairs, interval_logits, interval_sums

BATCH, QUERIES, KEYS, ROWS, WIDTH = 3, 4, 5, 7, 6

pytestmark = pytest.mark.usefixtures("double_precision")


def make(heads):
    """Returns pairs that share rows and leave two rows unused, queries, weights and the table."""
    pairs = Pairs(torch.randint(0, ROWS - 2, (BATCH, QUERIES, KEYS)), ROWS)
    query = torch.randn(BATCH, heads, QUERIES, WIDTH, requires_grad=True)
    weight = torch.rand(BATCH, heads, QUERIES, KEYS, requires_grad=True)
    table = torch.randn(heads, ROWS, WIDTH, requires_grad=True)
    return pairs, query, weight, table


def looked_up(table, pairs):
    """Returns the rows of all pairs, (batch, heads, queries, keys, width)."""
    return table[:, pairs.row].transpose(0, 1)


@pytest.fixture(params=[True, False], ids=["bags", "products"])
def form(request, monkeypatch):
    monkeypatch.setattr(intervals, "_in_bags", lambda pairs: request.param)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("heads", [1, 2])
def test_values_and_gradients_equal_looked_up_rows(heads):
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
def test_a_table_in_several_products_gets_all_gradients():
    pairs, query, weight, table = make(1)
    rows = looked_up(table, pairs)
    found = interval_logits(query, table, pairs).sum() + interval_sums(weight, table, pairs).square().sum()
    expected = (query.unsqueeze(3) * rows).sum() + (weight.unsqueeze(-1) * rows).sum(3).square().sum()
    inputs = (query, weight, table)
    torch.testing.assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs))


def test_the_cheaper_form_is_chosen():
    for num_rows, in_bags in ((50, False), (51, True)):
        assert intervals._in_bags(Pairs(torch.zeros(1, 2, 5), num_rows)) is in_bags


def test_a_batch_without_histories_has_gradients_of_zero(monkeypatch):
    monkeypatch.setattr(intervals, "_in_bags", lambda pairs: True)
    query, weight, table = (x[:0] if x.dim() == 4 else x for x in make(2)[1:])
    pairs = Pairs(torch.zeros(0, QUERIES, KEYS, dtype=torch.long), ROWS)
    found = interval_logits(query, table, pairs).sum() + interval_sums(weight, table, pairs).sum()
    of_query, of_weight, of_table = torch.autograd.grad(found, (query, weight, table))
    assert of_query.shape == query.shape and of_weight.shape == weight.shape and not of_table.any()


@pytest.mark.usefixtures("form")
def test_a_block_with_intervals_supports_recomputation():
    pairs, query, weight, table = make(2)
    calls = []

    def block(query, weight, table):
        calls.append(1)
        return interval_logits(query, table, pairs).sum() + interval_sums(weight, table, pairs).square().sum()

    inputs = (query, weight, table)
    expected = torch.autograd.grad(block(*inputs), inputs)
    calls.clear()
    found = torch.autograd.grad(checkpoint(block, *inputs, use_reentrant=False), inputs)
    assert len(calls) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_no_gradients_are_needed():
    row = torch.randint(0, 100, (2, 3, 4))
    query, weight, table = torch.randn(2, 1, 3, 5), torch.rand(2, 1, 3, 4), torch.randn(1, 100, 5)
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            pairs = Pairs(row, 100)
            found.append((interval_logits(query, table, pairs), interval_sums(weight, table, pairs)))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_bags_compute_in_single_precision_under_autocast(monkeypatch):
    monkeypatch.setattr(intervals, "_in_bags", lambda pairs: True)
    pairs, query, weight, table = (x.float() if isinstance(x, torch.Tensor) else x for x in make(2))
    with torch.autocast("cpu", torch.bfloat16):
        logits = interval_logits(query.bfloat16(), table, pairs)
        sums = interval_sums(weight.bfloat16(), table, pairs)
    rows = looked_up(table, pairs)
    torch.testing.assert_close(logits, (query.bfloat16().float().unsqueeze(3) * rows).sum(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(sums, (weight.bfloat16().float().unsqueeze(-1) * rows).sum(3), rtol=0, atol=1e-5)
