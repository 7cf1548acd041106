"""The samples of each global batch of a phase, in the order of training. Needs no torch."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from trainer.common.errors import UserError
from trainer.loading.order import EpochOrder

EPOCHS_KEPT = 2
"""What loads ahead may be in the next epoch of a phase already."""


@dataclass
class ShuffledOrder:
    """A permutation of all samples, anew in each epoch, cut into equal parts.

    num_samples: of the data set. global_batch_size: samples of a step. size: those that an epoch takes, at most all.
    """

    seed: int
    phase: int
    num_samples: int
    global_batch_size: int
    size: int

    def __post_init__(self) -> None:
        self._epoch = lru_cache(EPOCHS_KEPT)(lambda epoch: EpochOrder(self.seed, epoch, self.phase, self.num_samples))

    @property
    def num_steps(self) -> int:
        """Of an epoch."""
        return self.steps_before(0, self.size)

    @property
    def step_sizes(self) -> set[int]:
        """How many samples the steps of an epoch have."""
        return {min(self.global_batch_size, self.size), self.size - (self.num_steps - 1) * self.global_batch_size}

    def steps_before(self, epoch: int, consumed: int) -> int:
        """Steps that so many samples of an epoch make."""
        return -(-consumed // self.global_batch_size)

    def bounds(self, epoch: int, consumed: int) -> Iterator[tuple[int, int]]:
        """(start, end) of each global batch of an epoch that is left when so many samples are consumed."""
        for start in range(consumed, self.size, self.global_batch_size):
            yield start, min(start + self.global_batch_size, self.size)

    def samples(self, epoch: int, start: int, end: int) -> np.ndarray:
        """Those of a global batch, (end - start,) int64."""
        return self._epoch(epoch).take(start, end)


@dataclass
class TaskOrder:
    """The global batches of `Task.order`. Every epoch has equally many samples.

    source: what a message calls it. batches: those of an epoch. size: samples that an epoch takes. global_batch_size:
    what the command line asks for. The methods are those of `ShuffledOrder`; `bounds` and `samples` raise UserError.
    """

    source: str
    batches: Callable[[int], Sequence[np.ndarray] | None]
    global_batch_size: int
    size: int

    def __post_init__(self) -> None:
        self._epoch = lru_cache(EPOCHS_KEPT)(self._checked)

    @cached_property
    def num_steps(self) -> int:
        return self.steps_before(0, self.size)

    @property
    def step_sizes(self) -> set[int]:
        return {end - start for start, end in self.bounds(0, 0)}

    def steps_before(self, epoch: int, consumed: int) -> int:
        _, ends = self._epoch(epoch)
        return bisect_left(ends, consumed) + (consumed > 0)

    def bounds(self, epoch: int, consumed: int) -> Iterator[tuple[int, int]]:
        _, ends = self._epoch(epoch)
        for number in range(bisect_right(ends, consumed), len(ends)):
            if consumed < self.size:
                yield consumed, min(ends[number], self.size)
            consumed = ends[number]

    def samples(self, epoch: int, start: int, end: int) -> np.ndarray:
        batches, ends = self._epoch(epoch)
        number = bisect_right(ends, start)
        offset = ends[number - 1] if number else 0
        return batches[number][start - offset : end - offset]

    def _checked(self, epoch: int) -> tuple[Sequence[np.ndarray], Sequence[int]]:
        """The global batches, and where they end. Raises UserError."""
        batches = self.batches(epoch) or []
        size = getattr(batches, "batch_size", None)  # of all but the last: spares making them
        sizes = [] if size else [len(batch) for batch in batches]
        ends = range(size, size * len(batches) + 1, size) if size else list(accumulate(sizes))
        if not ends or ends[-1] < self.size or 0 in sizes:
            raise UserError(
                f"{self.source} gives {ends[-1] if ends else 0} samples in epoch {epoch + 1}, or an empty batch; every "
                f"epoch must have {self.size}, as num_samples says"
            )
        return batches, ends


SampleOrder = ShuffledOrder | TaskOrder
"""The samples of each global batch of a phase."""
