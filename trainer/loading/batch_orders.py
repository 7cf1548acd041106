"""Orders of batches that `Task.order` may return in place of a random permutation, such as length buckets or shards.

Each order is a pure function of its arguments, so the samples of a step do not depend on the number of processes. Each
sample is in exactly one batch. Except in `even_batches`, all batches but the last have the same size.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np

from trainer.loading.counter_random import random_bits
from trainer.loading.order import EpochOrder

BATCHES_PER_POOL = 100
"""Number of batches that are sorted by length together; sorting all would give similar batches in each epoch."""


def bucketed_batches(lengths: np.ndarray | Sequence[int], batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Returns batches of samples of similar length, to reduce padding; each epoch has different batches.

    Splits shuffled samples into pools of 100 batches, sorts each pool by length, splits the pools into batches, and
    shuffles the batches; a smaller batch stays last.

    lengths: length of each of n samples. batch_size: samples per optimizer step over all devices, at least 1. Returns
    ceil(n / batch_size) int64 arrays of up to batch_size sample indices, each sorted by length.
    """
    lengths = np.asarray(lengths)
    pools = _pools(lengths, batch_size, seed, epoch)
    batches = [pool[start : start + batch_size] for pool in pools for start in range(0, len(pool), batch_size)]
    num_full = len(lengths) // batch_size
    shuffled = EpochOrder(seed, epoch, 1, num_full).take(0, num_full)
    return [batches[i] for i in shuffled] + batches[num_full:]


def even_batches(lengths: np.ndarray | Sequence[int], batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Returns batches of similar total length: each has either many short samples or a few long samples.

    Works like `bucketed_batches`, but splits each pool into batches with a total length of at most about batch_size *
    mean(lengths). The number of batches may vary between epochs.

    lengths: above 0.
    """
    lengths = np.asarray(lengths)
    most = batch_size * lengths.mean()
    batches = []
    for pool in _pools(lengths, batch_size, seed, epoch):
        ends = np.cumsum(lengths[pool])
        middles = ends - lengths[pool] / 2
        part = middles * math.ceil(ends[-1] / most) // ends[-1]
        batches += np.split(pool, np.flatnonzero(np.diff(part)) + 1)
    shuffled = EpochOrder(seed, epoch, 1, len(batches)).take(0, len(batches))
    return [batches[i] for i in shuffled]


def _pools(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    order = EpochOrder(seed, epoch, 0, len(lengths)).take(0, len(lengths))
    pool_size = BATCHES_PER_POOL * batch_size
    pools = [order[start : start + pool_size] for start in range(0, len(order), pool_size)]
    return [pool[np.argsort(lengths[pool], kind="stable")] for pool in pools]


def sharded_batches(
    shard_sizes: np.ndarray | Sequence[int], batch_size: int, seed: int, epoch: int
) -> "ShardedBatches":
    """Returns batches for reading a data set shard by shard, with shuffled shards and shuffled samples in each shard.

    Use this order for files that do not fit into memory together: each shard is read once per epoch, and a batch has
    samples of one shard or of consecutive shards. Shuffle samples before writing them to shards, because samples of
    different shards rarely share a batch.

    shard_sizes: number of samples in each shard, at least 0; samples are numbered shard by shard. batch_size: samples
    per optimizer step over all devices, at least 1. Returns a sequence that creates int64 arrays of sample indices when
    it is indexed.
    """
    return ShardedBatches(np.asarray(shard_sizes, dtype=np.int64), batch_size, seed, epoch)


class BatchesOnDemand(Sequence[np.ndarray]):
    """Sequence of an epoch's batches, which are created when they are indexed.

    batch_size: samples in each batch except the last.
    """

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @overload
    def __getitem__(self, number: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, number: slice) -> list[np.ndarray]: ...

    def __getitem__(self, number: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(number, slice):
            return [self._batch(i) for i in range(len(self))[number]]
        return self._batch(range(len(self))[number])

    def _batch(self, number: int) -> np.ndarray:
        """Creates a batch. number: index of the batch, from 0 to len(self) - 1."""
        raise NotImplementedError


class ShardedBatches(BatchesOnDemand):
    """Sequence of batches that `sharded_batches` returns."""

    def __init__(self, shard_sizes: np.ndarray, batch_size: int, seed: int, epoch: int) -> None:
        super().__init__(int(shard_sizes.sum()), batch_size)
        num_shards = len(shard_sizes)
        self._epoch = epoch
        self._shards = EpochOrder(seed, epoch, 0, num_shards).take(0, num_shards)
        self._seeds = random_bits(seed, epoch, np.arange(num_shards), 1)[:, 0]
        self._sizes = shard_sizes
        self._first_samples = np.cumsum(shard_sizes) - shard_sizes
        self._ends = np.cumsum(shard_sizes[self._shards])  # position in the epoch where each shard of `_shards` ends
        self._order_of = lru_cache(maxsize=2)(self._shuffled)  # a batch may need the orders of two shards

    def _batch(self, number: int) -> np.ndarray:
        start = number * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        parts = []
        for shard, end in zip(self._shards[first : last + 1], self._ends[first : last + 1], strict=True):
            before = end - self._sizes[shard]  # number of samples before this shard in the epoch
            part = self._order_of(int(shard)).take(max(start - before, 0), min(stop, end) - before)
            parts.append(self._first_samples[shard] + part)
        return np.concatenate(parts)

    def _shuffled(self, shard: int) -> EpochOrder:
        return EpochOrder(int(self._seeds[shard]), self._epoch, 0, int(self._sizes[shard]))


class ConsecutiveBatches(BatchesOnDemand):
    """Batches of all samples in index order, for data sets whose samples change every epoch."""

    def _batch(self, number: int) -> np.ndarray:
        start = number * self.batch_size
        return np.arange(start, min(start + self.batch_size, self.num_samples))
