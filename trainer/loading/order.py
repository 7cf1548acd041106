"""Order of samples as a pure function of (seed, epoch, phase, position).

Global batch k is a slice of the epoch's permutation, and process r of w takes every w-th sample of the slice, starting
at sample r.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.loading.counter_random import GOLDEN, mix

MOST_SORTED_SAMPLES = 2**20
"""Largest number of samples whose order is computed at once, by sorting, which takes 0.1 s and 8 MiB."""
POSITIONS_AT_ONCE = 2**13
"""Number of positions whose samples are computed together, in 1 ms, if a data set is too large to sort."""


@dataclass(frozen=True, order=True)
class Position:
    """Position of a run, in units that do not depend on batch size or number of devices.

    epoch: completed epochs. phase: index of the current phase. samples: number of its samples used so far.

    If phases alternate (`Task.turns`), `samples` counts only the first phase. turn: steps since the last change of
    phase. others: for each other phase, (passes over its data, samples used in the current pass); empty at first.
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
        """Returns the number of completed passes over a phase's data, and of samples used in the current pass."""
        if in_turns and phase > 0:
            return self.others[phase - 1] if self.others else (0, 0)
        return (self.epoch, self.samples) if in_turns or phase == self.phase else (self.epoch + (phase < self.phase), 0)


@dataclass(frozen=True, slots=True)
class SampleKeys:
    """Identifies the samples of a micro-batch; random numbers for a sample depend only on its keys.

    index: (n,) int64, indices within the data set.
    epoch: epoch from 0, a key of per-sample random numbers (augmentation, negatives).
    phase: index of the task's phase.
    placeholder: whether this is a placeholder batch, whose samples do not count. A process without samples runs a
        placeholder batch, because every process must run the same number of micro-batches.
    progress: completed fraction of the run in [0, 1), equal for all samples of a step; 0 in evaluation.
    few_lengths: whether `padded_length` rounds up to one of a few fixed lengths; set by loaders for a GPU.
    """

    index: np.ndarray
    epoch: int
    phase: int = 0
    placeholder: bool = False
    progress: float = 0.0
    few_lengths: bool = False

    def padded_length(self, longest: int, step: int = 16) -> int:
        """Returns the length to which samples of a batch are padded, at least `longest`.

        On a CPU the result is `longest`, because padding costs time. On a GPU the result is one of a few fixed lengths,
        so that steps can be replayed as CUDA graphs: multiples of `step` up to 16 * step, then eight lengths per
        doubling. Padding adds at most an eighth to lengths of 8 * step or more. step: at least 1.
        """
        if not self.few_lengths:
            return int(longest)
        num_steps = -(-int(longest) // step)
        coarser = 1 << max(0, (num_steps - 1).bit_length() - 4)
        return -(-num_steps // coarser) * coarser * step


class EpochOrder:
    """Sample order of an epoch: a permutation of range(num_samples) determined by (seed, epoch, phase).

    For data sets that are too large to sort quickly, the permutation is computed in pieces, so 10^10 samples take no
    more memory or start-up time than 10^6 samples.
    """

    def __init__(self, seed: int, epoch: int, phase: int, num_samples: int) -> None:
        self._key = np.random.SeedSequence([seed, epoch, phase])
        self._num_samples = num_samples
        # the current piece of the order and its first position
        self._start, self._part = 0, np.empty(0, np.int64)
        if num_samples <= MOST_SORTED_SAMPLES:
            # Unlike `Generator.permutation`, sorting Philox's raw output gives the same order in all versions of NumPy.
            random = np.random.Philox(key=self._key.generate_state(2, np.uint64))
            self._part = np.argsort(random.random_raw(num_samples), kind="stable")

    def __len__(self) -> int:
        return self._num_samples

    def take(self, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start to stop - 1, as int64; callers must not modify the array."""
        assert 0 <= start <= stop <= self._num_samples
        if not self._start <= start <= stop <= self._start + len(self._part):
            # computes more positions than requested, because NumPy's call overhead dominates for a single batch
            end = min(max(stop, start + POSITIONS_AT_ONCE), self._num_samples)
            round_keys = self._key.generate_state(NUM_ROUNDS, np.uint64)
            self._part = keyed_permutation(round_keys, self._num_samples, np.arange(start, end))
            self._start = start
        return self._part[start - self._start : stop - self._start]


def num_micro_batches(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """Returns the number of forward passes that every process runs for a global batch."""
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
    """Returns one process's micro-batches of a global batch; all processes get the same number of micro-batches.

    samples: (m,) int64 with m >= 1, the whole global batch. shard: (rank, world_size). micro_batch_size: samples per
    forward pass of a process, >= 1. epoch, phase, progress: stored in the results.
    """
    rank, world_size = shard
    own = samples[rank::world_size]
    num_parts = num_micro_batches(len(samples), world_size, micro_batch_size)
    parts = [own[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(num_parts)]
    # A placeholder has two samples if possible, because batch norm rejects a single sample, which has no variance.
    instead = samples[: min(2, micro_batch_size)]
    return [
        SampleKeys(part if len(part) else instead, epoch, phase, placeholder=len(part) == 0, progress=progress)
        for part in parts
    ]


def evaluation_keys(num_samples: int, shard: tuple[int, int], batch_size: int) -> Iterator[SampleKeys]:
    """Yields the keys of a process's evaluation batches; all processes get equally many, counting placeholders."""
    step = batch_size * shard[1]
    for start in range(0, num_samples, step):
        samples = np.arange(start, min(start + step, num_samples))
        yield from split_global_batch(samples, shard, batch_size, epoch=0)


# --- a permutation computed piecewise ------------------------------------------------------------------------------

# The permutation is a Feistel network on a nearly square grid with at least n cells, with cycle walking: a cell number
# of n or more passes through the network again until it is below n (Black and Rogaway, "Ciphers with arbitrary finite
# domains", CT-RSA 2002: the generalised Feistel cipher). A Feistel network is a bijection for any round function; the
# round function here is SplitMix64 (see counter_random.py).

NUM_ROUNDS = 16
"""Rounds of the Feistel network. For a random-looking order, millions of samples need four, few samples need twelve."""


def keyed_permutation(round_keys: np.ndarray, num_samples: int, positions: np.ndarray) -> np.ndarray:
    """Returns the samples, as int64, at m given positions of a permutation of range(num_samples).

    round_keys: (NUM_ROUNDS,) uint64; an even number of keys. positions: (m,) int64 in [0, num_samples), where
    1 <= num_samples < 2^62. Time and memory are proportional to m and do not depend on num_samples.
    """
    cells = _network(round_keys, num_samples, positions.astype(np.uint64))
    while len(outside := np.flatnonzero(cells >= num_samples)) > 0:  # there are fewer such cells than rows of the grid
        cells[outside] = _network(round_keys, num_samples, cells[outside])
    return cells.view(np.int64)


def _network(round_keys: np.ndarray, num_samples: int, cells: np.ndarray) -> np.ndarray:
    """Permutes the cell numbers of the smallest nearly square grid with at least num_samples cells."""
    assert len(round_keys) % 2 == 0, "rows and columns are back in their places after an even number of rounds"
    num_rows = math.isqrt(num_samples - 1) + 1
    num_columns = -(-num_samples // num_rows)
    # each round shifts `one` by a function of `other`, and then swaps them
    one, other = cells // num_columns, cells % num_columns
    size, other_size = num_rows, num_columns
    for key in round_keys:
        one += mix(other * GOLDEN + key) >> 1  # 63 bits, so that the sum cannot overflow
        one %= size
        one, other, size, other_size = other, one, other_size, size
    return one * num_columns + other
