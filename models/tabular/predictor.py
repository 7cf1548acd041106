"""Prediction of class probabilities for tables of any size, with a model that supports a limited number of classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainer.loading.counter_random import random_bits

_FEWEST_QUERIES = 64
_LEAST_SHARE = 0.25
"""Minimum ratio of query rows to context rows in a forward pass, because each pass recomputes the context."""
TEMPERATURE = 0.7
"""Default divisor of the logits; below 1, because averaging the ensemble's members makes predictions less confident."""
_SYMBOLS, _PLACES, _ROWS, _SHIFTS, _SAMPLE = range(5)
"""Distinct last arguments of `random_bits`, which make the random orders and samples independent."""
Node = list[list[int]]
"""Node of a class tree: a list with the classes of each child."""


class TabularModel(Protocol):
    """Module that solves a batch of classification problems of equal shape."""

    max_classes: int
    """Maximum number of classes in a problem, at least 2."""

    def __call__(self, context: Tensor, labels: Tensor, queries: Tensor, /) -> Any:
        """Returns logits, (B, Q, max_classes); the caller ignores logits of classes that the problem lacks.

        context: (B, N, m), queries: (B, Q, m); missing values are NaN. labels: (B, N) int64.
        """

    def parameters(self) -> Iterator[nn.Parameter]: ...


def predict(
    model: TabularModel,
    context: Tensor,
    labels: Tensor,
    queries: Tensor,
    num_classes: int,
    *,
    num_estimators: int = 8,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    max_context: int = 1024,
    max_cells: int = 2**17,
) -> Tensor:
    """Returns class probabilities of each query row, (Q, num_classes) float64 on the CPU.

    Probabilities are averaged over the members of an ensemble. Each member applies the model to its own view of the
    table, with its own order of columns and classes. Every second member replaces values with normal scores, which
    suits skewed columns. If there are more than max_context context rows, each member draws its own sample, stratified
    by class. Logits are not averaged, because a confidently wrong member would dominate their mean, and because logits
    of different class trees are not comparable.

    If there are more classes than the model supports, they form a tree (`class_tree`), and the model chooses a child at
    each node. The probability of a class is the product of the probabilities of the choices on its path. The context
    of a node consists of the context rows of its classes. Classes without context rows have probability 0.

    model: must be in eval mode; computes on its own device, in the dtype of its parameters.
    context: (N, m), queries: (Q, m); missing values are NaN. labels: (N,) int64, from 0 to num_classes - 1.
    num_estimators: number of members. seed: determines the random orders and samples.
    temperature: divisor of the logits.
    max_cells: maximum number of rows times columns in one forward pass, to limit memory. A pass may exceed the limit,
        because it has room for at least one member's context rows and max(64, number of context rows / 4) query rows.
        Results for different max_cells differ only by rounding.
    """
    probabilities = torch.zeros(len(queries), num_classes, dtype=torch.float64)
    present, codes = np.unique(labels.numpy(force=True), return_inverse=True)
    if len(present) == 1 or len(queries) == 0:
        probabilities[:, present] = 1
        return probabilities

    like = next(model.parameters(), queries)
    context, queries = (x.to(like.device, like.dtype) for x in (context, queries))
    width = context.shape[1] + 1
    views = _views(codes, context.shape[1], model.max_classes, num_estimators, seed, max_context)
    most_rows = max(len(view.rows) for view in views)
    num_at_once = max(_FEWEST_QUERIES, int(_LEAST_SHARE * most_rows), max_cells // width - most_rows)
    batches = list(_batches(views, min(num_at_once, len(queries)), width, max_cells))
    with torch.inference_mode():
        for part, found in zip(queries.split(num_at_once), probabilities.split(num_at_once), strict=True):
            of_members = torch.ones(num_estimators, len(part), len(present), dtype=torch.float64)
            for batch in batches:
                for view, choices in zip(batch, _choices(model, batch, context, part, temperature), strict=True):
                    for child, classes in enumerate(view.node):
                        of_members[view.member][:, classes] *= choices[:, child, None]
            found[:, present] = of_members.mean(dim=0)
    return probabilities


@dataclass(frozen=True)
class _View:
    """View of the table that a member of the ensemble uses at one node of its class tree.

    rows: (N,) int64, indices of context rows. labels: (N,) int64, the child to which each row belongs. columns: (m,)
    int64, order of columns. by_rank: whether to replace values with normal scores.
    """

    member: int
    node: Node
    rows: Tensor
    labels: Tensor
    columns: Tensor
    by_rank: bool

    def inputs(self, context: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, labels, columns = (x.to(context.device) for x in (self.rows, self.labels, self.columns))
        context, queries = context[rows][:, columns], queries[:, columns]
        if self.by_rank:
            scored = normal_scores(context, torch.cat([context, queries]))
            context, queries = scored[: len(rows)], scored[len(rows) :]
        return context, labels, queries


def normal_scores(context: Tensor, values: Tensor) -> Tensor:
    """Replaces each value with the normal quantile of its rank among the context values of the same column.

    context: (N, m). values: (n, m). Equal values get equal scores, and non-finite values become NaN.
    """
    in_order = context.where(context.isfinite(), torch.inf).t().contiguous().sort(dim=1).values
    count = context.isfinite().sum(0)[:, None]
    columns = values.t().contiguous()
    below, upto = (torch.searchsorted(in_order, columns, side=side) for side in ("left", "right"))
    share = (torch.minimum(below + upto, 2 * count) + 1).double() / (2 * count + 2)
    return torch.special.ndtri(share).to(values.dtype).where(columns.isfinite(), torch.nan).t()


def _choices(
    model: TabularModel, views: Sequence[_View], context: Tensor, queries: Tensor, temperature: float
) -> Tensor:
    """Returns, for each view and query row, the probability of each child of the node: (views, Q, children) float64.

    All views must have equal numbers of context rows and of children.
    """
    inputs = zip(*(view.inputs(context, queries) for view in views), strict=True)
    logits: Tensor = model(*map(torch.stack, inputs))[..., : len(views[0].node)]
    return (logits.double().cpu() / temperature).softmax(dim=2)


def _views(
    labels: np.ndarray, num_columns: int, max_classes: int, num_members: int, seed: int, max_context: int
) -> list[_View]:
    """Returns the views of all members at all nodes, sorted by number of rows, then by number of children."""
    views = []
    num_classes = int(labels.max()) + 1
    for member in range(num_members):
        columns = torch.from_numpy(_latin_order(num_columns, member, seed))
        cycle, turn = divmod(member, num_classes)
        shift = _permutation(num_classes, seed, cycle, _SHIFTS)[turn]
        for node in class_tree(np.roll(np.arange(num_classes), shift).tolist(), max_classes):
            child_of = np.full(num_classes, -1)
            for child, classes in enumerate(node):
                child_of[classes] = child
            rows = np.flatnonzero(child_of[labels] >= 0)
            rows = rows[_stratified(labels[rows], max_context, seed, member)]
            children = torch.from_numpy(child_of[labels[rows]])
            views.append(_View(member, node, torch.from_numpy(rows), children, columns, by_rank=member % 2 == 1))
    return sorted(views, key=_shape)


def _shape(view: _View) -> tuple[int, int]:
    return len(view.rows), len(view.node)


def _batches(views: Sequence[_View], num_queries: int, width: int, max_cells: int) -> Iterator[list[_View]]:
    """Yields batches of views with equal numbers of rows and children, which therefore need no padding."""
    for (num_rows, _), alike in groupby(views, key=_shape):
        size = max(1, max_cells // ((num_rows + num_queries) * width))
        waiting = list(alike)
        yield from (waiting[first : first + size] for first in range(0, len(waiting), size))


def _latin_order(num_columns: int, member: int, seed: int) -> np.ndarray:
    """Returns the column order of a member, which is a row of a random Latin square.

    Among the num_columns members that share a square, each column takes each position once.
    """
    square, row = divmod(member, num_columns)
    symbols, places, rows = (_permutation(num_columns, seed, square, part) for part in (_SYMBOLS, _PLACES, _ROWS))
    return symbols[(places + rows[row]) % num_columns]


def _stratified(labels: np.ndarray, num: int, seed: int, member: int) -> np.ndarray:
    """Samples `num` row indices (or all, if fewer exist) in proportion to class sizes, at least one per class."""
    if len(labels) <= num:
        return np.arange(len(labels))
    num = max(num, len(np.unique(labels)))
    chance = random_bits(seed, member, np.arange(len(labels)), 1, _SAMPLE)[:, 0]
    sizes = np.bincount(labels)
    order = np.lexsort((chance, labels))
    place_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # After sorting by (position in class) / (class size), the first rows contain classes in proportion to their sizes.
    relative = (place_in_class + 0.5) / sizes[labels[order]]
    return np.sort(order[np.argsort(np.where(place_in_class == 0, 0, relative), kind="stable")[:num]])


def _permutation(size: int, seed: int, number: int, stream: int) -> np.ndarray:
    return np.argsort(random_bits(seed, number, np.arange(size), 1, stream)[:, 0], kind="stable")


def class_tree(classes: Sequence[int], max_classes: int) -> list[Node]:
    """Builds a tree of choices between groups of classes; returns its nodes, each with 2 to max_classes children.

    Paths to classes are as short as possible, and the children of a node differ in size by at most one class. Each
    child consists of consecutive classes, so the order of classes determines the tree.

    classes: at least 2 class indices. max_classes: at least 2.
    """
    size = 1
    while size * max_classes < len(classes):
        size *= max_classes
    children = _split(classes, -(-len(classes) // size))
    below = [node for child in children if len(child) > 1 for node in class_tree(child, max_classes)]
    return [children, *below]


def _split(classes: Sequence[int], num_parts: int) -> Node:
    bounds = [len(classes) * i // num_parts for i in range(num_parts + 1)]
    return [list(classes[first:last]) for first, last in pairwise(bounds)]
