"""Who sees which sample, when: a pure function of (seed, epoch, phase, position).

The order of an epoch does not depend on the number of processes. Global batch k is a slice of the epoch's
permutation, and process r of w takes every w-th sample of that slice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.loading.counter_random import GOLDEN, mix

MOST_SORTED_SAMPLES = 2**20
"""The largest data set whose order is sorted as a whole, in 0.1 s and 8 MiB."""
POSITIONS_AT_ONCE = 2**13
"""Of a larger data set: what is computed together, in 1 ms."""


@dataclass(frozen=True, order=True)
class Position:
    """How far a run has come, in units that survive a change of batch size or of device count.

    epoch: number of completed epochs. phase: index of the current phase. samples: consumed in this phase.

    Of phases in turns, phase is the one whose turn it is, and samples are of the first one, whose data make the
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

    def of_phase(self, phase: int, in_turns: bool) -> tuple[int, int]:
        """The completed epochs of a phase in its own data, and the samples consumed of the current one."""
        if in_turns and phase > 0:
            return self.others[phase - 1] if self.others else (0, 0)
        return (self.epoch, self.samples) if in_turns or phase == self.phase else (self.epoch + (phase < self.phase), 0)


@dataclass(frozen=True, slots=True)
class SampleKeys:
    """Names the samples of one micro-batch; everything random about a sample is derived from its key.

    index: (n,) int64, positions within the data set.
    epoch: 0-based epoch, part of the key of per-sample randomness (augmentation, negatives).
    phase: index of the task's phase.
    placeholder: the samples are real but must not count; a process that has no sample of its own in a
        micro-batch still runs it, because every process runs equally many.
    progress: share of the run that is done, in [0, 1), equal for all samples of a step; 0 in evaluation.
    few_lengths: `padded_length` rounds up. The loader says so where the batch is for a GPU.
    """

    index: np.ndarray
    epoch: int
    phase: int = 0
    placeholder: bool = False
    progress: float = 0.0
    few_lengths: bool = False

    def padded_length(self, longest: int, step: int = 16) -> int:
        """The length to pad ragged samples to, at least `longest`, that of the longest of them.

        On a CPU it is `longest`, because each element of padding takes time there. A GPU can replay a step whose shapes
        it has seen before, so it gets few lengths: multiples of `step` up to 16 steps, beyond that eight between a
        length and its double. So a sample of 8 steps or more grows by an eighth at most. step: at least 1.
        """
        if not self.few_lengths:
            return int(longest)
        num_steps = -(-int(longest) // step)
        coarser = 1 << max(0, (num_steps - 1).bit_length() - 4)
        return -(-num_steps // coarser) * coarser * step


class EpochOrder:
    """The sample order of one epoch: a permutation of range(num_samples) that (seed, epoch, phase) determine.

    Of a data set too large to be sorted in no time it is computed where it is needed, so that 10^10 samples take no
    more memory, and no more time before the first batch, than 10^6.
    """

    def __init__(self, seed: int, epoch: int, phase: int, num_samples: int) -> None:
        self._key = np.random.SeedSequence([seed, epoch, phase])
        self._num_samples = num_samples
        # The part of the order that is at hand, and the position at which it begins.
        self._start, self._part = 0, np.empty(0, np.int64)
        if num_samples <= MOST_SORTED_SAMPLES:
            # Sorting raw Philox output is stable across numpy versions, which `Generator.permutation` does not promise.
            random = np.random.Philox(key=self._key.generate_state(2, np.uint64))
            self._part = np.argsort(random.random_raw(num_samples), kind="stable")

    def __len__(self) -> int:
        return self._num_samples

    def take(self, start: int, stop: int) -> np.ndarray:
        """The samples at the positions from start to stop, (stop - start,) int64; 0 <= start <= stop <= len(self).

        Not to be written to.
        """
        assert 0 <= start <= stop <= self._num_samples
        if not self._start <= start <= stop <= self._start + len(self._part):
            # More than asked for: a batch alone costs more in calls of numpy than in arithmetic.
            end = min(max(stop, start + POSITIONS_AT_ONCE), self._num_samples)
            round_keys = self._key.generate_state(NUM_ROUNDS, np.uint64)
            self._part = keyed_permutation(round_keys, self._num_samples, np.arange(start, end))
            self._start = start
        return self._part[start - self._start : stop - self._start]


def num_micro_batches(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """Forwards that every process runs for a global batch of this many samples."""
    largest_share = -(-global_batch_size // world_size)
    return -(-largest_share // micro_batch_size)


def split_global_batch(
    samples: np.ndarray,
    shard: tuple[int, int],
    micro_batch_size: int,
    epoch: int,
    phase: int = 0,
    progress: float = 0.0,
) -> list[SampleKeys]:
    """The micro-batches that one process runs for one global batch; equally many on every process.

    samples: (m,) int64 with m >= 1, the whole global batch.
    shard: (rank, world_size).
    micro_batch_size: samples that one process takes in one forward, >= 1.
    epoch, phase, progress: see `SampleKeys`.
    """
    rank, world_size = shard
    own = samples[rank::world_size]
    num_parts = num_micro_batches(len(samples), world_size, micro_batch_size)
    parts = [own[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(num_parts)]
    # Of two samples where there are two: a single one has no variance, and batch norm would refuse it.
    instead = samples[: min(2, micro_batch_size)]
    return [
        SampleKeys(part if len(part) else instead, epoch, phase, placeholder=len(part) == 0, progress=progress)
        for part in parts
    ]


def evaluation_keys(num_samples: int, shard: tuple[int, int], batch_size: int) -> Iterator[SampleKeys]:
    """Batches that together count every sample once over all processes; equally many on every process."""
    step = batch_size * shard[1]
    for start in range(0, num_samples, step):
        samples = np.arange(start, min(start + step, num_samples))
        yield from split_global_batch(samples, shard, batch_size, epoch=0)


# --- a permutation that is computed where it is needed -----------------------------------------------------------

# A Feistel network on a grid of rows and columns of nearly equal numbers that holds at least n cells, with cycle
# walking: a cell beyond n goes through the network again until it is below n. (Black and Rogaway, "Ciphers with
# arbitrary finite domains", CT-RSA 2002: the generalised Feistel cipher.) A network is a bijection whatever its round
# function is. This one's is the SplitMix64 generator (see counter_random.py).

NUM_ROUNDS = 16
"""Keys of a good permutation. Four look random for millions of samples, but a handful of them takes twelve and more."""


def keyed_permutation(round_keys: np.ndarray, num_samples: int, positions: np.ndarray) -> np.ndarray:
    """The samples at these positions of a permutation of range(num_samples): (m,) int64.

    round_keys: (NUM_ROUNDS,) uint64; any other even number of them makes a permutation too, but a worse one.
    positions: (m,) int64, each in [0, num_samples); 1 <= num_samples < 2^62.
    Takes time and memory proportional to m, whatever num_samples is.
    """
    cells = _network(round_keys, num_samples, positions.astype(np.uint64))
    while len(outside := np.flatnonzero(cells >= num_samples)) > 0:  # fewer than rows
        cells[outside] = _network(round_keys, num_samples, cells[outside])
    return cells.view(np.int64)


def _network(round_keys: np.ndarray, num_samples: int, cells: np.ndarray) -> np.ndarray:
    """Permutes the cells of the smallest grid that is as good as square and holds the samples."""
    assert len(round_keys) % 2 == 0, "rows and columns are back in their places after an even number of rounds"
    num_rows = math.isqrt(num_samples - 1) + 1
    num_columns = -(-num_samples // num_rows)
    # Each round shifts `one` by a function of `other`, and they change places.
    one, other = cells // num_columns, cells % num_columns
    size, other_size = num_rows, num_columns
    for key in round_keys:
        one += mix(other * GOLDEN + key) >> 1  # 63 bits, so that the sum does not overflow
        one %= size
        one, other, size, other_size = other, one, other_size, size
    return one * num_columns + other
