"""Who sees which sample, when: a pure function of (seed, epoch, phase, position).

The order of an epoch does not depend on the number of processes. Global batch k is a slice of the epoch's
permutation, and process r of w takes every w-th sample of that slice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, order=True)
class Position:
    """How far a run has come, in units that survive a change of batch size or of device count.

    epoch: number of completed epochs. phase: index of the current phase. samples: consumed in this phase.

    Of phases in turns, phase is the one whose turn it is, and samples are those of the first one, whose data make the
    epoch. turn: steps done in this turn. others: (epochs, samples of the current one) of each other phase in its own
    data, since the start of training; empty before any.
    """

    epoch: int = 0
    phase: int = 0
    samples: int = 0
    turn: int = 0
    others: tuple[tuple[int, int], ...] = ()

    @property
    def at_epoch_start(self) -> bool:
        return self.phase == self.samples == self.turn == 0

    def is_end_of(self, epoch: int) -> bool:
        """Whether exactly so many epochs are done."""
        return self.epoch == epoch and self.at_epoch_start


@dataclass(frozen=True, slots=True)
class SampleKeys:
    """Names the samples of one micro-batch; everything random about a sample is derived from its key.

    index: (n,) int64, positions within the data set.
    epoch: 0-based epoch, part of the key of per-sample randomness (augmentation, negatives).
    phase: index of the task's phase.
    placeholder: the samples are real but must not count; a process that has no sample of its own in a
        micro-batch still runs it, because every process runs equally many.
    """

    index: np.ndarray
    epoch: int
    phase: int = 0
    placeholder: bool = False


def epoch_permutation(seed: int, epoch: int, phase: int, num_samples: int) -> np.ndarray:
    """The sample order of one epoch, (num_samples,) int64.

    Sorting raw Philox output is stable across numpy versions, which `Generator.permutation` does not promise.
    """
    key = np.random.SeedSequence([seed, epoch, phase]).generate_state(2, np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")


def num_micro_batches(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """Forwards that every process runs for a global batch of this many samples."""
    largest_share = -(-global_batch_size // world_size)
    return -(-largest_share // micro_batch_size)


def split_global_batch(
    samples: np.ndarray, shard: tuple[int, int], micro_batch_size: int, epoch: int, phase: int = 0
) -> list[SampleKeys]:
    """The micro-batches that one process runs for one global batch; equally many on every process.

    samples: (m,) int64 with m >= 1, the whole global batch.
    shard: (rank, world_size).
    micro_batch_size: samples that one process takes in one forward, >= 1.
    """
    rank, world_size = shard
    own = samples[rank::world_size]
    num_parts = num_micro_batches(len(samples), world_size, micro_batch_size)
    parts = [own[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(num_parts)]
    placeholder = SampleKeys(samples[:1], epoch, phase, placeholder=True)
    return [SampleKeys(part, epoch, phase) if len(part) else placeholder for part in parts]


def evaluation_keys(num_samples: int, shard: tuple[int, int], batch_size: int) -> Iterator[SampleKeys]:
    """Batches that together count every sample once over all processes; equally many on every process."""
    everything = np.arange(num_samples)
    step = batch_size * shard[1]
    for start in range(0, num_samples, step):
        yield from split_global_batch(everything[start : start + step], shard, batch_size, epoch=0)
