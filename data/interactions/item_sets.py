"""Sets of items per user, and uniform random draws of items outside these sets."""

from dataclasses import dataclass

import numpy as np

from trainer.loading.arrays import Array, Ragged, arange_like, namespace, on_host
from trainer.loading.cache import Arrays
from trainer.loading.counter_random import below
from trainer.loading.on_device import Movable


@dataclass(frozen=True)
class ItemSets(Movable):
    """Distinct items of each user, and a numbering of all other items.

    For a user's items s_0 < s_1 < ..., the r-th other item (r from 0, items from 1) is r + 1 + j, where j is the number
    of k with s_k - 1 - k <= r, since s_k - 1 - k other items are smaller than s_k.

    offsets: (num_users + 1,) int64; user u has items[offsets[u] : offsets[u + 1]].
    items: (m,) int32, ascending for each user.
    thresholds: (m,) int64, ascending: u * (num_items + 1) + s_k - 1 - k.
    """

    stays = frozenset({"items"})

    offsets: np.ndarray
    items: np.ndarray
    thresholds: np.ndarray
    num_items: int

    @classmethod
    def of_pairs(cls, users: np.ndarray, items: np.ndarray, num_users: int, num_items: int) -> "ItemSets":
        """Builds sets from pairs of user and item, (n,) each, in any order; pairs may repeat."""
        stride = num_items + 1
        users, items = np.divmod(sorted_distinct(users * stride + items), stride)
        return cls.of_sorted(np.searchsorted(users, np.arange(num_users + 1)), items.astype(np.int32), num_items)

    @classmethod
    def of_sorted(cls, offsets: np.ndarray, items: np.ndarray, num_items: int) -> "ItemSets":
        """Builds sets from offsets and items as described for the class."""
        users, position = numbered(np.diff(offsets))
        return cls(offsets, items, users * (num_items + 1) + items - 1 - position, num_items)

    @property
    def arrays(self) -> Arrays:
        return {"offsets": self.offsets, "items": self.items, "thresholds": self.thresholds}

    def sizes(self, users: Array) -> Array:
        """Returns the sizes of the sets of users (B,): (B,) int64."""
        return self.offsets.take(users + 1) - self.offsets.take(users)

    def num_others(self, users: Array) -> Array:
        """Returns how many items are outside each user's set, for users (B,): (B,) int64."""
        return self.num_items - self.sizes(users)

    def others(self, users: Array, r: Array) -> Array:
        """Returns the r-th items outside the sets of users (B,): (B, n) int64. r: (B, n), 0 <= r < num_others."""
        if on_host(r) and r.shape[1] > self.num_items:
            return self._others_by_table(users, r)
        return r + 1 + self._num_smaller(users, r)

    def _num_smaller(self, users: Array, r: Array) -> Array:
        """Returns how many items of each user's set are smaller than the r-th item outside the set: (B, n).

        A CPU searches only each user's thresholds; a GPU searches all thresholds in a single kernel.
        """
        wanted, first = users[:, None] * (self.num_items + 1) + r, self.offsets.take(users)[:, None]
        if not on_host(r):
            return namespace(r).searchsorted(self.thresholds, wanted, right=True) - first
        found = np.zeros(r.shape, np.int64)
        last, size = first - 1, self.sizes(users)[:, None]
        for bit in reversed(range(int(size.max(initial=0)).bit_length())):
            more = found + (1 << bit)
            found = np.where((more <= size) & (self.thresholds[last + np.minimum(more, size)] <= wanted), more, found)
        return found

    def _others_by_table(self, users: np.ndarray, r: np.ndarray) -> np.ndarray:
        """Computes `others` from lists of all other items, which is faster if n exceeds the number of items."""
        size = self.sizes(users)
        is_other = np.ones((len(users), self.num_items + 1), bool)
        is_other[:, 0] = False
        own = Ragged(self.offsets[users], size, size.max(initial=0)).of(self.items)
        is_other[np.arange(len(users))[:, None], own] = False
        others, num_others = np.nonzero(is_other)[1], self.num_items - size
        return others[(np.cumsum(num_others) - num_others)[:, None] + r]


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expands counts per user, (num_users,), to n pairs of user and index from 0 to count - 1: (n,) int64 each."""
    users = np.repeat(np.arange(len(counts)), counts)
    return users, np.arange(len(users)) - (np.cumsum(counts) - counts)[users]


def sorted_distinct(values: np.ndarray) -> np.ndarray:
    """Sorts and deduplicates non-negative integers (n,); np.unique, which hashes from NumPy 2.3 on, is much slower."""
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=-1) > 0]


def distinct_below(bits: Array, limit: Array) -> Array:
    """Maps uniform 64-bit words (B, n) to int64 values below limit (B,), distinct per row; all sets are equally likely.

    Uses Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", Communications of the ACM 30(9), 1987). Round i
    draws from the first limit - n + i + 1 numbers. If the draw was chosen before, the last of these numbers, which no
    earlier round could draw, replaces the draw.

    All rounds run at once. Sorting shows which draws repeat an earlier draw. A draw was also chosen before if it is the
    last number of an earlier round that replaced its own draw. To find out, each round points to the round whose last
    number it drew.
    """
    num, least = bits.shape[1], (limit - bits.shape[1])[:, None]
    round_ = arange_like(num, bits)
    newest = least + round_
    drawn = below(bits.reshape(-1, 1), newest.reshape(-1) + 1).reshape(newest.shape)
    row = arange_like(len(bits), bits)[:, None] * num
    at = row + (drawn * num + round_).argsort(axis=1)
    ordered = drawn.take(at)
    is_newest = drawn == newest
    is_newest.reshape(-1)[at[:, 1:]] |= ordered[:, 1:] == ordered[:, :-1]
    xp = namespace(drawn)
    joined = row + xp.where(drawn < least, round_, drawn - least)
    for _ in range((num - 1).bit_length()):
        is_newest, joined = is_newest | is_newest.take(joined), joined.take(joined)
    return xp.where(is_newest, newest, drawn)
