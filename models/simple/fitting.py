"""Fits simple recommenders: computes their buffers from training histories, for several hyperparameter settings.

The caller selects a model's setting on the validation set.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from models.simple.recommenders import MOST_ITEMS_OF_EASE, MOST_NEIGHBOURS

Buffers = Mapping[str, np.ndarray]
Cells = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Arrays (item, other item, sum), (n,) each, with a sum for each pair of items."""
Strength = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Function that maps the arrays of `Cells` to the strengths of the item pairs, (n,)."""

_LEAST_WEIGHT = 1e-4
"""Recency weight below which an item in a history is ignored."""
_SHRINKAGE = 20
"""Number added to the denominator of cosine similarity, to reduce the similarity of items with few users."""
_PAIRS = 2**22
"""Approximate number of item pairs counted at a time."""
_SPARSE = 8
"""Ratio of array elements to pairs above which pairs are sorted instead of counted in a dense array."""
_USERS = 1024
"""Number of users whose dense rows are multiplied at a time."""


@dataclass(frozen=True)
class TrainingHistories:
    """Concatenated items of all users' training histories.

    offsets: (num_users + 1,) int64; the items of user u are items[offsets[u] : offsets[u + 1]]. items: (n,), integers
    from 1 to num_items. is_ordered: whether each user's items are in time order.
    """

    offsets: np.ndarray
    items: np.ndarray
    num_items: int
    is_ordered: bool

    @cached_property
    def users(self) -> np.ndarray:
        """Returns the user index of each item, (n,) int64."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @cached_property
    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns distinct (user, item) pairs, sorted by user, as arrays of users and items: (m,) int64 each."""
        pairs = np.sort(self.users * (self.num_items + 1) + self.items)
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        return pairs // (self.num_items + 1), pairs % (self.num_items + 1)

    @property
    def num_pairs(self) -> int:
        """Returns the number of item pairs in all histories, which is the sum of their squared lengths."""
        return int((np.diff(self.offsets) ** 2).sum())

    @cached_property
    def popularity(self) -> np.ndarray:
        """Returns the number of users of each item: (num_items + 1,) float64; 0 for padding."""
        return np.bincount(self.distinct[1], minlength=self.num_items + 1).astype(np.float64)

    @cached_property
    def common_users(self) -> np.ndarray:
        """Returns the number of users that each pair of items has in common, (num_items + 1, num_items + 1) float32."""
        counts = np.zeros((self.num_items + 1, self.num_items + 1), np.float32)
        users, items = self.distinct
        for first in range(0, len(self.offsets) - 1, _USERS):
            here = slice(*np.searchsorted(users, [first, first + _USERS]))
            has = np.zeros((_USERS, self.num_items + 1), np.float32)
            has[users[here] - first, items[here]] = 1
            counts += has.T @ has
        return counts


def candidates(kind: str, histories: TrainingHistories, maxlen: int) -> Iterator[Buffers]:
    """Yields the buffers of a simple model for each setting to try. kind: key of `SIMPLE_MODELS`."""
    popularity = histories.popularity.astype(np.float32)
    if kind == "popularity":
        yield {"popularity": popularity}
        return
    fitted, decays = _FITTED[kind]
    for buffers in fitted(histories):
        for decay in decays if histories.is_ordered else (1.0,):
            recency = (decay ** np.arange(maxlen)).astype(np.float32)
            recency[recency < _LEAST_WEIGHT] = 0
            yield {"popularity": popularity, "recency": recency, **buffers}


def _rules(histories: TrainingHistories) -> Iterator[Buffers]:
    """Yields tables of rules; the strength of a rule measures how often one item closely follows another item.

    The strength of a rule is the sum of 1 / distance between the items, divided by the square root of the preceding
    item's frequency. In every second table, strengths are also divided by the square root of the following item's
    frequency, which favours rare items.
    """
    items, num_items = histories.items.astype(np.int64), histories.num_items
    begins = histories.offsets[histories.users]
    by_item = np.argsort(items, kind="stable")
    first = np.searchsorted(items[by_item], np.arange(num_items + 2))
    counts = np.maximum(np.bincount(items, minlength=num_items + 1), 1)

    def plain(item: np.ndarray, before: np.ndarray, sums: np.ndarray) -> np.ndarray:
        return sums / counts[before] ** 0.5

    def favouring_rare(item: np.ndarray, before: np.ndarray, sums: np.ndarray) -> np.ndarray:
        return sums / (counts[before] * counts[item]) ** 0.5

    for window in (3, 10):
        distances = np.arange(1, window + 1)

        def going_before(start: int, stop: int, distances: np.ndarray = distances) -> Cells:
            here = by_item[first[start] : first[stop]]
            there = here[:, None] - distances
            is_one = there >= begins[here][:, None]
            item = np.broadcast_to(items[here][:, None], there.shape)[is_one]
            weights = np.broadcast_to(1 / distances, there.shape)[is_one]
            return _summed(item, items[there[is_one]], weights, start, stop, num_items)

        yield from _tables(going_before, np.diff(first) * window, num_items, [plain, favouring_rare])


def _item_knn(histories: TrainingHistories) -> Iterator[Buffers]:
    """Yields tables of cosine similarities between items' sets of users, shrunk towards 0 for items with few users."""
    popularity, num_items = histories.popularity, histories.num_items
    users, items = histories.distinct
    by_item = np.argsort(items, kind="stable")
    first, own = np.searchsorted(items[by_item], np.arange(num_items + 2)), np.bincount(users)
    begins = np.cumsum(own) - own

    def in_common(start: int, stop: int) -> Cells:
        if num_items <= MOST_ITEMS_OF_EASE:
            rows = histories.common_users[start:stop]
            item, other = np.nonzero(rows)
            return item + start, other, rows[item, other]
        pairs = by_item[first[start] : first[stop]]
        their = own[users[pairs]]
        at = np.repeat(begins[users[pairs]] - (np.cumsum(their) - their), their) + np.arange(their.sum())
        return _summed(np.repeat(items[pairs], their), items[at], None, start, stop, num_items)

    def cosine(item: np.ndarray, other: np.ndarray, sums: np.ndarray) -> np.ndarray:
        return sums / ((popularity[item] * popularity[other]) ** 0.5 + _SHRINKAGE)

    costs = np.bincount(items, own[users], minlength=num_items + 1)
    [table] = _tables(in_common, costs, num_items, [cosine])
    for num in sorted({min(num, num_items) for num in (50, MOST_NEIGHBOURS)}):
        yield {name: array[:, :num] for name, array in table.items()}


def _ease(histories: TrainingHistories) -> Iterator[Buffers]:
    """Yields weights -P / diag(P) with a zero diagonal, where P = (X'X + penalty I)^-1 for the user-item matrix X."""
    for penalty in (100, 500):
        gram = torch.from_numpy(histories.common_users[1:, 1:]).double()
        gram.diagonal().add_(penalty)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram)).numpy()
        weights = np.zeros(histories.common_users.shape, np.float32)
        weights[1:, 1:] = inverse / -np.diag(inverse)
        np.fill_diagonal(weights, 0)
        yield {"weights": weights}


_FITTED: Mapping[str, tuple[Callable[[TrainingHistories], Iterator[Buffers]], Sequence[float]]] = {
    "rules": (_rules, (0.5, 0.8, 0.9)), "itemknn": (_item_knn, (0.8, 0.9)), "ease": (_ease, (0.9,)),
}  # fmt: skip
"""Maps each model to its fitting function and the decay factors to try: ratios of consecutive recency weights."""


def _summed(
    item: np.ndarray, other: np.ndarray, weights: np.ndarray | None, start: int, stop: int, num_items: int
) -> Cells:
    """Sums weights (1 each if None) over equal (item, other) pairs, for items from `start` to `stop` - 1."""
    keys, num_cells = (item - start) * (num_items + 1) + other, (stop - start) * (num_items + 1)
    if len(keys) * _SPARSE < num_cells:
        keys, place = np.unique(keys, return_inverse=True)
        sums = np.bincount(place, weights)
    else:
        sums = np.bincount(keys, weights, minlength=num_cells)
        keys = np.flatnonzero(sums)
        sums = sums[keys]
    return keys // (num_items + 1) + start, keys % (num_items + 1), sums


def _tables(
    block: Callable[[int, int], Cells], costs: np.ndarray, num_items: int, strengths: Sequence[Strength]
) -> list[Buffers]:
    """Builds a table of each item's strongest neighbours, excluding the item itself, for each strength function.

    block: function that maps (start, stop) to the `Cells` of items `start` to `stop` - 1, sorted by item. costs:
    (num_items + 1,), number of pairs that `block` visits for each item.
    """
    size = num_items + 1, min(MOST_NEIGHBOURS, num_items)
    tables: list[Buffers] = [
        {"neighbours": np.zeros(size, np.int32), "strengths": np.zeros(size, np.float32)} for _ in strengths
    ]
    done, start = np.concatenate([[0], np.cumsum(costs)]), 0
    while start <= num_items:
        within = int(np.searchsorted(done, done[start] + _PAIRS, side="right")) - 1
        stop = min(max(start + 1, within), start + max(1, 2 * _PAIRS // num_items), num_items + 1)
        item, other, sums = block(start, stop)
        item, other, sums = (array[item != other] for array in (item, other, sums))
        for table, strength in zip(tables, strengths, strict=True):
            _keep_strongest(table, start, stop, item, other, strength(item, other, sums))
        start = stop
    return tables


def _keep_strongest(
    table: Buffers, start: int, stop: int, item: np.ndarray, other: np.ndarray, strength: np.ndarray
) -> None:
    """Writes rows `start` to `stop` - 1 of a table. item, other, strength: (n,), sorted by item."""
    row, num_kept = item - start, table["strengths"].shape[1]
    counts = np.bincount(row, minlength=stop - start)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    values = np.zeros((stop - start, max(num_kept, int(counts.max()))))
    neighbours = np.zeros(values.shape, np.int32)
    values[row, place], neighbours[row, place] = strength, other
    best = np.argpartition(-values, num_kept - 1, axis=1)[:, :num_kept]
    best = np.take_along_axis(best, np.argsort(-np.take_along_axis(values, best, 1), axis=1, kind="stable"), 1)
    table["strengths"][start:stop] = np.take_along_axis(values, best, 1)
    table["neighbours"][start:stop] = np.take_along_axis(neighbours, best, 1)
