"""Sets of items, one for each user, and exact draws among the items that are not in them."""

from dataclasses import dataclass

import numpy as np

from trainer.loading.cache import Arrays


@dataclass(frozen=True)
class ItemSets:
    """The distinct items of each user, and a bijection from numbers onto all the other items.

    With a user's items s_0 < s_1 < ... the r-th other item (r from 0, items from 1) is r + 1 + j, where j is the number
    of k with s_k - 1 - k <= r: s_k - 1 - k others are smaller than s_k. A binary search finds j, without rejection, for
    any number of users at once.

    offsets: (num_users + 1,) int64; the items of user u are at offsets[u] to offsets[u + 1].
    items: (m,) int32, ascending for each user.
    thresholds: (m,) int64, u * (num_items + 1) + s_k - 1 - k: ascending.
    """

    offsets: np.ndarray
    items: np.ndarray
    thresholds: np.ndarray
    num_items: int

    @classmethod
    def of_pairs(cls, users: np.ndarray, items: np.ndarray, num_users: int, num_items: int) -> "ItemSets":
        """From (user, item) pairs (n,) in any order, with repetitions."""
        stride = num_items + 1
        pairs = sorted_distinct(users * stride + items)
        users, items = np.divmod(pairs, stride)
        offsets = np.searchsorted(users, np.arange(num_users + 1))
        position = np.arange(len(pairs)) - offsets[users]
        return cls(offsets, items.astype(np.int32), pairs - 1 - position, num_items)

    @property
    def arrays(self) -> Arrays:
        """What a cache keeps."""
        return {"offsets": self.offsets, "items": self.items, "thresholds": self.thresholds}

    def sizes(self, users: np.ndarray) -> np.ndarray:
        """How many items are in the sets of the users (B,): (B,) int64."""
        return self.offsets[users + 1] - self.offsets[users]

    def num_others(self, users: np.ndarray) -> np.ndarray:
        """How many items are not in the sets of the users (B,): (B,) int64."""
        return self.num_items - self.sizes(users)

    def others(self, users: np.ndarray, r: np.ndarray) -> np.ndarray:
        """Items outside of the sets of the users (B,), by number: r (B, n), 0 <= r < num_others, to (B, n) int64."""
        if r.shape[1] > self.num_items:
            return self._others_by_table(users, r)
        return r + 1 + self._num_smaller(users, r)

    def _num_smaller(self, users: np.ndarray, r: np.ndarray) -> np.ndarray:
        """How many items of the user are smaller than the r-th other item: (B, n).

        A search among the user's own thresholds: one in all of them, np.searchsorted, reads more memory.
        """
        found = np.zeros(r.shape, np.int64)
        wanted, size = users[:, None] * (self.num_items + 1) + r, self.sizes(users)[:, None]
        last = self.offsets[users][:, None] - 1
        for bit in reversed(range(int(size.max(initial=0)).bit_length())):
            more = found + (1 << bit)
            found = np.where((more <= size) & (self.thresholds[last + np.minimum(more, size)] <= wanted), more, found)
        return found

    def _others_by_table(self, users: np.ndarray, r: np.ndarray) -> np.ndarray:
        """The same from lists of all others, which pays where there are more numbers than items."""
        is_other = np.ones((len(users), self.num_items + 1), bool)
        is_other[:, 0] = False
        is_other[np.arange(len(users))[:, None], self.padded(users)] = False
        others = np.nonzero(is_other)[1]
        num_others = self.num_others(users)
        return others[(np.cumsum(num_others) - num_others)[:, None] + r]

    def padded(self, users: np.ndarray, num_more: int = 0) -> np.ndarray:
        """The sets of the users (B,) and so many columns for more: (B, S + num_more) int64, zeros behind."""
        count = self.sizes(users)
        return ragged(self.items, self.offsets[users], count, count.max(initial=0) + num_more).astype(np.int64)


def sorted_distinct(values: np.ndarray) -> np.ndarray:
    """np.unique of (n,) integers from 0; since numpy 2.3 that hashes them, which takes ten times as long."""
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=-1) > 0]


def ragged(values: np.ndarray, start: np.ndarray, length: np.ndarray, width: int | None = None) -> np.ndarray:
    """values[start : start + length] of each row, zeros behind: (B, width); by default as wide as the longest row."""
    if width is None:
        width = length.max(initial=0)
    index = np.minimum(start[:, None] + np.arange(width), len(values) - 1)
    return np.where(is_real(length, width), values[index], 0)


def is_real(length: np.ndarray, width: int) -> np.ndarray:
    """Which entries of rows that are as wide as the longest belong to them: (B, width) bool."""
    return np.arange(width) < length[:, None]


def below(bits: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Uniform words (B, n) to uniform numbers 0 <= r < limit (B,), int64; off from uniform by limit / 2^64 at most."""
    return (bits % limit[:, None].astype(np.uint64)).astype(np.int64)


def distinct_below(bits: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Uniform words (B, n) to n distinct numbers 0 <= r < limit (B,), int64; each set of n is equally probable.

    Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", Communications of the ACM 30(9), 1987): in
    round i draw among the first limit - n + i + 1 numbers; the last of these, new in the round, replaces a repetition.
    """
    num = bits.shape[1]
    chosen = np.empty((num, len(bits)), np.int64)
    for i in range(num):
        newest = limit - num + i
        r = below(bits[:, i : i + 1], newest + 1)[:, 0]
        repeated = (chosen[:i] == r).any(axis=0)
        chosen[i] = np.where(repeated, newest, r)
    return chosen.T
