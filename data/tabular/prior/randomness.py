"""Random numbers that make each table independent of its batch."""

import math

import numpy as np
import torch
from torch import Tensor

from trainer.loading.counter_random import random_bits, uniform

SHAPE_STREAM, KIND_STREAM, _SEED_STREAM, _FIRST_STREAM = range(4)
"""Random number streams of `counter_random`, one per purpose; uniform numbers use _FIRST_STREAM and later streams."""
_CHUNK = 1024
"""Number of values drawn at a time for small requests; the overhead of a call costs as much as hundreds of values."""
_MOST_POOLS = 16
_GRANULE = 16

Bound = float | Tensor


class TableRandom:
    """Random numbers for a batch of tables.

    Row i of a result depends only on (seed, numbers[i], attempt) and on the preceding calls. Uniform numbers
    are hashed counters. Normal numbers come from a generator that is reseeded for each table.

    numbers: (G,) int64, table indices. attempt: counts repeated draws of a table, each with different results.
    """

    def __init__(self, seed: int, numbers: np.ndarray, attempt: int) -> None:
        self._key = (seed, attempt, numbers)
        self._uniform = np.empty((len(numbers), 0), np.float32)
        self._normal = torch.empty(len(numbers), 0)
        self._num_chunks = 0
        self._seeds = random_bits(*self._key, _MOST_POOLS, _SEED_STREAM).T.tolist()
        self._generator = torch.Generator()

    def uniform(self, *shape: int) -> Tensor:
        """Draws uniform numbers in [0, 1): (G, *shape)."""
        num = math.prod(shape)
        if self._uniform.shape[1] < num:
            self._uniform = uniform(*self._key, (max(num, _CHUNK),), _FIRST_STREAM + self._num_chunks)
            self._num_chunks += 1
        taken, self._uniform = self._uniform[:, :num], self._uniform[:, num:]
        return torch.from_numpy(taken.reshape(-1, *shape))

    def between(self, low: Bound, high: Bound, *shape: int) -> Tensor:
        """Draws uniform numbers between two bounds (numbers or broadcastable tensors): (G, *shape)."""
        return self.uniform(*shape) * (high - low) + low

    def log_between(self, low: float, high: float, *shape: int) -> Tensor:
        """Draws log-uniform numbers between two bounds: (G, *shape)."""
        return self.between(math.log(low), math.log(high), *shape).exp_()

    def integer(self, low: int | Tensor, high: int | Tensor, *shape: int) -> Tensor:
        """Draws integers from low to high, inclusive: (G, *shape) int64."""
        # An integer times a multiple of 2^-24 below 1 is never rounded up to the integer.
        return (self.uniform(*shape) * (high - low + 1)).long() + low

    def chance(self, probability: Bound, *shape: int) -> Tensor:
        """Draws booleans that are True with the given probability: (G, *shape)."""
        return self.uniform(*shape) < probability

    def normal(self, *shape: int) -> Tensor:
        """Draws standard normal numbers: (G, *shape)."""
        num = math.prod(shape)
        if num > _CHUNK:
            return self._pool(num).view(-1, *shape)
        if self._normal.shape[1] < num:
            self._normal = self._pool(_CHUNK)
        taken, self._normal = self._normal[:, :num], self._normal[:, num:]
        return taken.unflatten(1, shape)

    def _pool(self, num: int) -> Tensor:
        # The generator uses only 32 bits of a seed. Two tables may get equal normal numbers, but not uniform ones.
        pool = torch.empty(len(self._key[2]), num)
        for of_table, seed in zip(pool.unbind(), self._seeds.pop(), strict=True):
            of_table.normal_(generator=self._generator.manual_seed(seed))
        return pool

    def of(self, part: slice) -> "TableRandom":
        """Returns an independent `TableRandom` for a slice of the tables."""
        seed, attempt, numbers = self._key
        return TableRandom(~seed, numbers[part], attempt)


def padded(size: int) -> int:
    """Rounds a size up to a multiple of 16, so that consecutive float32 matrices have the same 64-byte alignment."""
    return -(-size // _GRANULE) * _GRANULE


def products(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies matrices (G, p, q) and (G, q, r), table by table, because the rounding of torch.bmm may depend on G.

    r must be a multiple of 16, because the rounding of a product may depend on memory alignment.
    """
    assert b.shape[2] % _GRANULE == 0
    result = a.new_empty(len(a), a.shape[1], b.shape[2])
    for x, y, out in zip(a.unbind(), b.unbind(), result.unbind(), strict=True):
        torch.mm(x, y, out=out)
    return result
