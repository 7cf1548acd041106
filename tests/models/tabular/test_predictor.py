"""Tests the predictor with models whose predictions are known: nearest rows, and shares of classes."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.tabular import predictor as module
from models.tabular.predictor import class_tree, normal_scores, predict

MAX_CLASSES = 10


class NearestRow(nn.Module):
    """Model that is sure of the class of the nearest context row, in any order of columns."""

    max_classes = MAX_CLASSES

    def forward(self, context: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        nearest = torch.cdist(queries, context).argmin(2)
        return 100 * nn.functional.one_hot(labels.gather(1, nearest), MAX_CLASSES).to(context.dtype)


class Shares(nn.Module):
    """Model that predicts the logarithms of the classes' shares of the context rows."""

    max_classes = MAX_CLASSES

    def forward(self, context: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        shares = nn.functional.one_hot(labels, MAX_CLASSES).to(context.dtype).mean(1)
        return shares.log().unsqueeze(1).expand(-1, queries.shape[1], -1)


class Smooth(nn.Module):
    """Model that depends on values, on the order of columns and classes, and on all context rows."""

    max_classes = MAX_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 20, dtype=torch.float64))
        self.shapes: list[tuple[int, int, int]] = []

    def forward(self, context: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        self.shapes.append((len(context), context.shape[1], queries.shape[1]))
        weight = self.weight[: context.shape[2]]
        near = torch.cdist((queries * weight).nan_to_num(), (context * weight).nan_to_num()).neg().softmax(2)
        votes = near @ nn.functional.one_hot(labels, MAX_CLASSES).to(near.dtype)
        return votes * torch.arange(1, MAX_CLASSES + 1)


def table(num_classes: int, num_rows: int = 400, num_queries: int = 300, num_columns: int = 5) -> tuple[Tensor, ...]:
    """Returns context, labels and queries; each class has at least one context row."""
    rng = np.random.default_rng(num_classes)
    labels = np.concatenate([np.arange(num_classes), rng.integers(0, num_classes, num_rows - num_classes)])
    centres = rng.normal(size=(num_classes, num_columns)) * 3
    context = centres[labels] + rng.normal(size=(num_rows, num_columns))
    queries = centres[rng.integers(0, num_classes, num_queries)] + rng.normal(size=(num_queries, num_columns))
    return tuple(torch.from_numpy(x) for x in (context, labels, queries))


def slow_normal_scores(context: Tensor, values: Tensor) -> Tensor:
    """Computes the scores one value at a time."""
    found = torch.full_like(values, torch.nan)
    for column in range(context.shape[1]):
        known = [x for x in context[:, column].tolist() if math.isfinite(x)]
        for row, value in enumerate(values[:, column].tolist()):
            if math.isfinite(value):
                rank = sum(x < value for x in known) + sum(x == value for x in known) / 2
                found[row, column] = NormalDist().inv_cdf((rank + 0.5) / (len(known) + 1))
    return found


def nearest(context: Tensor, labels: Tensor, queries: Tensor, num_classes: int) -> Tensor:
    return nn.functional.one_hot(labels[torch.cdist(queries, context).argmin(1)], num_classes).double()


def test_normal_scores_are_quantiles_of_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    context, values = (torch.randn(n, 4, generator=generator).mul(3).round().double() for n in (40, 15))
    context[::5, 1], values[::4, 1], context[:, 2], context[0, 3] = torch.nan, torch.nan, 7, torch.inf
    torch.testing.assert_close(normal_scores(context, values), slow_normal_scores(context, values), equal_nan=True)
    scores = normal_scores(context[:, :1].exp(), context[:, :1].exp())
    torch.testing.assert_close(scores, normal_scores(context[:, :1], context[:, :1]))  # only the order matters
    assert normal_scores(context.half(), values.half()).dtype == torch.float16


# The tree of classes


@pytest.mark.parametrize("num_classes", [2, 3, 9, 10, 11, 19, 20, 21, 26, 99, 100, 101, 110, 1000, 1001])
@pytest.mark.parametrize("max_classes", [2, 3, 10])
def test_a_tree_of_classes_is_balanced_and_leads_to_each(num_classes, max_classes) -> None:
    nodes = class_tree(list(range(num_classes)), max_classes)
    assert all(2 <= len(node) <= max_classes for node in nodes)
    assert all(max(map(len, node)) - min(map(len, node)) <= 1 for node in nodes)
    paths: dict[int, list] = {c: [] for c in range(num_classes)}
    for number, node in enumerate(nodes):
        for child, classes in enumerate(node):
            for c in classes:
                paths[c].append((number, child))
    assert len({tuple(path) for path in paths.values()}) == num_classes
    longest = max(map(len, paths.values()))
    assert max_classes ** (longest - 1) < num_classes <= max_classes**longest
    if num_classes <= max_classes:
        assert nodes == [[[c] for c in range(num_classes)]]


@pytest.mark.parametrize("num_classes", [2, 10, 11, 26, 100, 101])
def test_nearest_rows_are_found_through_every_tree(num_classes) -> None:
    context, labels, queries = table(num_classes)
    by_rank = nearest(normal_scores(context, context), labels, normal_scores(context, queries), num_classes)
    found = predict(NearestRow(), context, labels, queries, num_classes, num_estimators=3)
    assert found.dtype == torch.float64 and found.shape == (len(queries), num_classes)
    if num_classes <= MAX_CLASSES:  # tree nodes rank only among the rows of their classes
        expected = (2 * nearest(context, labels, queries, num_classes) + by_rank) / 3
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    alone = predict(NearestRow(), context, labels, queries, num_classes, num_estimators=1)
    torch.testing.assert_close(alone, nearest(context, labels, queries, num_classes), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_classes", [2, 10, 11, 26, 100, 101])
def test_probabilities_multiply_along_the_tree(num_classes) -> None:
    context, labels, queries = table(num_classes)
    found = predict(Shares(), context, labels, queries[:3], num_classes, temperature=1, num_estimators=4)
    shares = torch.bincount(labels) / len(labels)
    torch.testing.assert_close(found, shares.double().expand(3, -1), rtol=1e-6, atol=0)


def test_classes_without_a_context_row_have_probability_0() -> None:
    context, labels, queries = table(26)
    rows = labels % 2 == 1
    found = predict(Shares(), context[rows], labels[rows], queries, 30, temperature=1)
    assert (found[:, 0::2] == 0).all() and (found[:, 27:] == 0).all() and (found[:, 1:26:2] > 0).all()
    only = predict(Shares(), context[:5], torch.full((5,), 3), queries, 5)
    assert torch.equal(only, nn.functional.one_hot(torch.full((len(queries),), 3), 5).double())


# The ensemble


def test_every_ensemble_member_undoes_its_permutations() -> None:
    """Members agree if they all see values, or all see ranks, because the model ignores orders."""
    context, labels, queries = table(4)
    by_member = [
        predict(NearestRow(), context, labels, queries, 4, num_estimators=n, seed=s)
        for n, s in [(1, 0), (1, 9), (2, 0), (8, 3)]
    ]
    torch.testing.assert_close(by_member[0], by_member[1], rtol=0, atol=0)
    torch.testing.assert_close(by_member[2], by_member[3], rtol=0, atol=1e-12)


def slow_predict(model: Smooth, context: Tensor, labels: Tensor, queries: Tensor, num_classes: int) -> Tensor:
    """Predicts one row and one member at a time."""
    total = torch.zeros(len(queries), num_classes, dtype=torch.float64)
    for view in module._views(labels.numpy(), context.shape[1], 10, 8, 0, 1024):
        order = [classes[0] for classes in view.node]
        for i, query in enumerate(queries):
            seen, asked = context[:, view.columns], query[view.columns].unsqueeze(0)
            if view.member % 2 == 1:
                seen, asked = slow_normal_scores(seen, seen), slow_normal_scores(seen, asked)
            codes = torch.tensor([order.index(c) for c in labels.tolist()])
            logits = model(seen.unsqueeze(0), codes.unsqueeze(0), asked.unsqueeze(0))[0, 0, :num_classes] / 0.7
            for code, c in enumerate(order):
                total[i, c] += (logits[code].exp() / logits.exp().sum()).detach() / 8
    return total


def test_an_ensemble_is_the_mean_of_its_members() -> None:
    context, labels, queries = table(3, num_rows=30, num_queries=6)
    context[::4, 1] = queries[::2, 2] = torch.nan
    found = predict(Smooth(), context, labels, queries, 3)
    torch.testing.assert_close(found, slow_predict(Smooth(), context, labels, queries, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_classes", [3, 26])
@pytest.mark.parametrize("max_cells", [1, 3000, 30_000, 10**9])
def test_memory_bounds_do_not_change_results(num_classes, max_cells) -> None:
    context, labels, queries = table(num_classes)
    model = Smooth()
    whole = predict(Smooth(), context, labels, queries, num_classes, max_cells=2**20)
    found = predict(model, context, labels, queries, num_classes, max_cells=max_cells)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    if max_cells == 10**9:
        assert (8, 400, 300) in model.shapes  # the first nodes of all members at once
    for num_problems, num_rows, num_queries in model.shapes:
        assert num_problems * (num_rows + num_queries) * 6 <= max_cells or (num_problems == 1 and num_queries <= 100)


def test_predictions_depend_only_on_arguments_and_seed() -> None:
    context, labels, queries = table(12)
    first, again, other = (predict(Smooth(), context, labels, queries, 12, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not first.is_inference()
    torch.testing.assert_close(first.sum(1), torch.ones(len(queries), dtype=torch.float64))


def test_ensemble_members_permute_the_classes() -> None:
    views = module._views(np.arange(5), 4, 10, 10, 0, 1024)
    codes = np.stack([view.labels for view in views])
    for square in (codes[:5], codes[5:]):
        assert all(sorted(line) == list(range(5)) for line in (*square, *square.T))
        assert ((np.diff(square, axis=1) - 1) % 5 == 0).all()


def test_each_column_occurs_once_in_each_position() -> None:
    orders = np.stack([module._latin_order(7, member, seed=0) for member in range(14)])
    for square in (orders[:7], orders[7:]):
        assert all(sorted(line) == list(range(7)) for line in (*square, *square.T))
    assert len({tuple(order) for order in orders}) == 14
    neighbours = {frozenset(pair) for order in orders for pair in zip(order, np.roll(order, 1), strict=True)}
    assert len(neighbours) > 14  # a square of shifted rows has 7


def test_too_many_rows_are_sampled_by_class_and_member() -> None:
    labels = np.repeat([0, 1, 2], [900, 98, 2])
    views = module._views(labels, 3, 10, 4, 0, 100)
    samples = {tuple(view.rows.tolist()) for view in views}
    assert len(samples) == 4
    for rows in samples:
        counts = np.bincount(labels[list(rows)])
        assert len(set(rows)) == 100 and abs(counts - [90, 10, 1]).max() <= 1 and counts.min() >= 1
    assert {len(view.rows) for view in module._views(labels, 3, 10, 4, 0, 2)} == {3}
    rows = torch.zeros(1000, 3), torch.from_numpy(labels), torch.zeros(1, 3)
    found = predict(Shares(), *rows, 3, max_context=100, temperature=1)
    assert found[0, 0] == pytest.approx(0.9, abs=0.02)


def test_lower_nodes_use_all_fitting_rows_of_their_classes() -> None:
    views = module._views(np.arange(2000) % 20, 3, 10, 1, 0, 1000)
    assert [len(view.rows) for view in views] == [1000, 1000, 1000]
    assert {len(set(labels)) for view in views for labels in [view.labels.tolist()]} == {2, 10}


@pytest.mark.parametrize("num_queries", [0, 1, 63, 64, 65])
def test_few_queries_are_predicted_equally(num_queries) -> None:
    context, labels, queries = table(3)
    found = predict(Smooth(), context, labels, queries[:num_queries], 3, max_cells=1)
    expected = predict(Smooth(), context, labels, queries, 3)[:num_queries]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_dtype_follows_the_model() -> None:
    context, labels, queries = table(3)
    low = predict(Smooth(), context.float(), labels, queries.float(), 3)
    torch.testing.assert_close(low, predict(Smooth(), context, labels, queries, 3), rtol=0, atol=1e-5)
