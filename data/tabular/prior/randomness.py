"""Random numbers of several tables at once, each table's a function of its own number alone."""

import math

import numpy as np
import torch
from torch import Tensor

from trainer.loading.counter_random import random_bits, uniform

_SEED_STREAM, _FIRST_STREAM = 1, 2
_CHUNK = 256
"""Uniform numbers that are hashed together: one call of numpy costs as much as some hundred numbers."""
_MOST_CALLS = 32

Bound = float | Tensor


class TableRandom:
    """Whatever is random about some tables. Row i of a result depends on (seed, numbers[i], attempt) and on the calls.

    Parameters come from hashed counters, pools of many numbers from a generator that each table seeds anew.

    numbers: (G,) int64, the tables. attempt: another one gives other numbers.
    """

    def __init__(self, seed: int, numbers: np.ndarray, attempt: int) -> None:
        self._key = (seed, attempt, numbers)
        self._left = torch.empty(len(numbers), 0)
        self._num_chunks = 0
        self._seeds = random_bits(*self._key, _MOST_CALLS, _SEED_STREAM).T.tolist()
        self._generator = torch.Generator()

    def uniform(self, *shape: int) -> Tensor:
        """Parameters in [0, 1): (G, *shape)."""
        num = math.prod(shape)
        if self._left.shape[1] < num:
            size = max(num, _CHUNK)
            self._left = torch.from_numpy(uniform(*self._key, (size,), _FIRST_STREAM + self._num_chunks))
            self._num_chunks += 1
        taken, self._left = self._left[:, :num], self._left[:, num:]
        return taken.reshape(-1, *shape)

    def between(self, low: Bound, high: Bound, *shape: int) -> Tensor:
        """Uniform between two bounds, each a number or (G, *shape): (G, *shape)."""
        return low + self.uniform(*shape) * (high - low)

    def log_between(self, low: float, high: float, *shape: int) -> Tensor:
        """The same, uniform in the logarithm."""
        return self.between(math.log(low), math.log(high), *shape).exp()

    def integer(self, low: Bound, high: Bound, *shape: int) -> Tensor:
        """From low to high, both included: (G, *shape) int64."""
        # Rounding could reach the next number, once in millions of draws.
        return torch.minimum(self.between(low, high + 1.0, *shape).floor(), torch.as_tensor(high)).long()

    def chance(self, probability: Bound, *shape: int) -> Tensor:
        """True with a probability: (G, *shape) bool."""
        return self.uniform(*shape) < probability

    def normals(self, *shape: int) -> Tensor:
        """A pool of standard normal numbers: (G, *shape)."""
        pools = torch.empty(len(self._key[2]), *shape)
        for pool, seed in zip(pools, self._seeds.pop(), strict=True):
            pool.normal_(generator=self._generator.manual_seed(seed))
        return pools

    def uniforms(self, *shape: int) -> Tensor:
        """A pool of numbers in [0, 1): (G, *shape)."""
        pools = torch.empty(len(self._key[2]), *shape)
        for pool, seed in zip(pools, self._seeds.pop(), strict=True):
            pool.uniform_(generator=self._generator.manual_seed(seed))
        return pools
