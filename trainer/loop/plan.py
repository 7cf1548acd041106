"""Plans the optimizer steps of a run: their epochs, phases and global batches."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np

from trainer.common.errors import UserError
from trainer.loading.order import EpochOrder, Position

EPOCHS_KEPT = 2
"""Number of epochs whose sample order is kept in memory, because prefetching may reach into the next epoch."""


@dataclass
class ShuffledOrder:
    """Sample order with a new permutation of all samples in each epoch, cut into global batches.

    num_samples: size of the data set. global_batch_size: samples per step. size: samples used per epoch.
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
        return self.steps_before(0, self.size)

    @property
    def step_sizes(self) -> set[int]:
        return {min(self.global_batch_size, self.size), self.size - (self.num_steps - 1) * self.global_batch_size}

    def steps_before(self, epoch: int, consumed: int) -> int:
        return -(-consumed // self.global_batch_size)

    def bounds(self, epoch: int, consumed: int) -> Iterator[tuple[int, int]]:
        """Yields (start, end) of each global batch of an epoch after the first `consumed` samples."""
        for start in range(consumed, self.size, self.global_batch_size):
            yield start, min(start + self.global_batch_size, self.size)

    def samples(self, epoch: int, start: int, end: int) -> np.ndarray:
        """Returns the sample indices of a global batch, (end - start,) int64."""
        return self._epoch(epoch).take(start, end)


class StreamOrder(ShuffledOrder):
    """Samples in the order in which a stream yields them."""

    def samples(self, epoch: int, start: int, end: int) -> np.ndarray:
        return np.arange(start, end)


@dataclass
class TaskOrder:
    """Sample order defined by a task (`Task.order`), with the interface of `ShuffledOrder`.

    source: name of the order in messages. batches: returns an epoch's global batches of sample indices. size: samples
    per epoch, equal for all epochs. global_batch_size: the size requested on the command line. num_items: size of the
    data set. Methods raise UserError if an epoch has too few samples or an empty batch, or if an index is invalid.
    """

    source: str
    batches: Callable[[int], Sequence[np.ndarray] | None]
    global_batch_size: int
    size: int
    num_items: int

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
        batch = np.asarray(batches[number])
        if batch.dtype.kind not in "iu" or batch.ndim != 1 or not 0 <= batch.min() <= batch.max() < self.num_items:
            raise UserError(
                f"{self.source} gives {str(batch.tolist())[:60]} as batch {number + 1} of epoch {epoch + 1}; a batch "
                f"must be an array of sample indices, whole numbers from 0 to {self.num_items - 1}"
            )
        return batch.astype(np.int64, copy=False)[start - offset : end - offset]

    def _checked(self, epoch: int) -> tuple[Sequence[np.ndarray], Sequence[int]]:
        """Returns an epoch's global batches and the cumulative sums of their sizes."""
        batches: Any = self.batches(epoch)
        if not all(hasattr(batches, name) for name in ("__len__", "__getitem__")):
            raise UserError(f"{self.source} must return a list of arrays of indices, not {type(batches).__name__}")
        size = getattr(batches, "batch_size", None)  # size of all batches but the last; avoids building them
        try:
            sizes = [] if size else [len(batch) for batch in batches]
        except TypeError as error:  # a flat list of indices
            raise UserError(f"{self.source} must return one array of indices per step: {error}") from None
        ends = range(size, size * len(batches) + 1, size) if size else list(accumulate(sizes))
        if not ends or ends[-1] < self.size or 0 in sizes:
            raise UserError(
                f"{self.source} gives {ends[-1] if ends else 0} samples and {sizes.count(0)} empty batches in epoch "
                f"{epoch + 1}; every epoch must have at least {self.size} samples (num_samples) and no empty batch"
            )
        return batches, ends


SampleOrder = ShuffledOrder | TaskOrder
"""Type of an object that selects the samples of each global batch in a training phase."""


class PlannedStep(NamedTuple):
    """Samples and position of a planned step.

    phase: the phase's index. epoch: number of the pass over the phase's data, from 0. start, end: range of the global
    batch within the epoch's samples. after: the run's position after the step. progress: training progress at the
    middle of the step, in epochs or steps as in `Plan.total`, for the learning rate schedule.
    """

    phase: int
    epoch: int
    start: int
    end: int
    after: Position
    progress: float


@dataclass(frozen=True)
class Plan:
    """Schedule of a run's steps, metric reports and validations.

    epochs, max_steps: length of the run in epochs or in optimizer steps; one of the two is None. orders: sample
    order of each phase. turns: optimizer steps that each phase takes before the next phase; empty if each phase runs
    once per epoch. eval_every, eval_every_steps: epochs or optimizer steps between validations; both None without a
    validation set.
    """

    epochs: int | None
    orders: tuple[SampleOrder, ...]
    turns: tuple[int, ...] = ()
    eval_every: int | None = 1
    max_steps: int | None = None
    eval_every_steps: int | None = None

    @cached_property
    def total(self) -> float:
        length = self.epochs if self.max_steps is None else self.max_steps
        assert length is not None
        return float(length)

    @property
    def num_steps(self) -> int:
        return self.max_steps if self.max_steps is not None else int(self.total) * self.steps_per_epoch

    @property
    def has_validation(self) -> bool:
        return self.eval_every is not None or self.eval_every_steps is not None

    @cached_property
    def phase_sizes(self) -> list[int]:
        return [order.size for order in self.orders]

    @cached_property
    def samples_per_epoch(self) -> int:
        """Samples per epoch, summed over all phases; if phases take turns, only the first phase counts."""
        return self.phase_sizes[0] if self.turns else sum(self.phase_sizes)

    @cached_property
    def steps_per_epoch(self) -> int:
        steps = [order.num_steps for order in self.orders]
        if not self.turns:
            return sum(steps)
        return steps[0] + -(-steps[0] // self.turns[0]) * sum(self.turns[1:])

    def is_through(self, num_epochs: int, num_steps: int) -> bool:
        """Returns whether `num_epochs` epochs, or `num_steps` optimizer steps, complete the run."""
        return (num_epochs if self.max_steps is None else num_steps) >= self.total

    def validates_after(self, num_epochs: int, num_steps: int) -> bool:
        """Returns whether a validation follows `num_epochs` epochs or `num_steps` optimizer steps."""
        if not self.has_validation:
            return False
        if self.is_through(num_epochs, num_steps):
            return True
        return num_epochs % self.eval_every == 0 if self.eval_every is not None else self.reports_after(num_steps)

    def reports_after(self, num_steps: int) -> bool:
        """Returns whether to report metrics after `num_steps` optimizer steps, possibly in the middle of an epoch."""
        if self.max_steps is not None and num_steps >= self.max_steps:
            return True
        return self.eval_every_steps is not None and num_steps % self.eval_every_steps == 0

    def logs_after(self, num_steps: int, step: PlannedStep, interval: int) -> bool:
        """Returns whether to log a step: every `interval`-th; if phases take turns, one per phase in each interval."""
        is_last_of_turn = step.after.turn == 0
        return num_steps >= interval and num_steps % interval < (sum(self.turns) or 1) and is_last_of_turn

    def consumed(self, position: Position) -> int:
        """Returns how many samples of the epoch have been used at a position, up to `samples_per_epoch`."""
        before = [] if self.turns else self.phase_sizes[: position.phase]
        return sum(before) + position.samples

    def epochs_done(self, position: Position) -> float:
        """Returns the training progress at a position as a fractional number of epochs."""
        return position.epoch + self.consumed(position) / self.samples_per_epoch

    def steps_done(self, position: Position) -> int:
        """Returns the number of optimizer steps up to a position, as if all steps used the current batch size."""
        order = self.orders[0 if self.turns else position.phase]
        own_steps = order.steps_before(position.epoch, position.samples)
        steps = position.epoch * self.steps_per_epoch + own_steps
        if not self.turns:
            return steps + sum(order.num_steps for order in self.orders[: position.phase])
        # Adds the other phases' turns of all rounds begun, then subtracts their steps left in the current round.
        steps += -(-own_steps // self.turns[0]) * sum(self.turns[1:])
        if position.phase > 0:
            return steps - sum(self.turns[position.phase :]) + position.turn
        return steps - sum(self.turns[1:]) if position.turn > 0 else steps

    def rest_of_epoch(self, position: Position, num_done: int) -> Iterator[PlannedStep]:
        """Yields the remaining steps of the current epoch, up to the end of the run.

        num_done: optimizer steps done so far; used only if the run's length is in steps.
        """
        steps = self._steps_from(position)
        if self.max_steps is None:
            return steps
        left = islice(steps, max(0, self.max_steps - num_done))
        return (step._replace(progress=number + 0.5) for number, step in enumerate(left, start=num_done))

    def is_end_of_epoch(self, position: Position) -> bool:
        return next(self._steps_from(position), None) is None

    def _steps_from(self, position: Position) -> Iterator[PlannedStep]:
        return self._in_turns(position) if self.turns else self._one_after_another(position)

    def _one_after_another(self, position: Position) -> Iterator[PlannedStep]:
        epoch, consumed = position.epoch, position.samples
        for phase in range(position.phase, len(self.orders)):
            before = sum(self.phase_sizes[:phase])
            for start, end in self.orders[phase].bounds(epoch, consumed):
                progress = epoch + (before + (start + end) // 2) / self.samples_per_epoch
                yield PlannedStep(phase, epoch, start, end, Position(epoch, phase, end), progress)
            consumed = 0

    def _in_turns(self, position: Position) -> Iterator[PlannedStep]:
        """Yields steps of alternating phases until the first has used up its data and the others have had their turns.

        The other phases cycle through their own data, and use the learning rate of the first phase's latest step.
        """
        first, phase, turn = self.orders[0], position.phase, position.turn
        others = position.others or ((0, 0),) * (len(self.orders) - 1)
        used = [(position.epoch, position.samples), *others]  # of each phase: passes over its data, samples in this one
        while phase > 0 or used[0][1] < first.size:
            stepped, order, (epoch, samples) = phase, self.orders[phase], used[phase]
            if samples >= order.size:
                epoch, samples = epoch + 1, 0
            start, end = next(order.bounds(epoch, samples))
            used[phase] = epoch, end
            turn += 1
            if turn == self.turns[phase] or (phase == 0 and end == first.size):
                phase, turn = (phase + 1) % len(self.orders), 0
            after = Position(position.epoch, phase, used[0][1], turn, tuple(used[1:]))
            middle = (start + end) // 2 if stepped == 0 else after.samples - (first.global_batch_size + 1) // 2
            progress = position.epoch + max(middle, 0) / self.samples_per_epoch
            yield PlannedStep(stepped, epoch, start, end, after, progress)


@dataclass(frozen=True)
class BatchSplit:
    """Split of a global batch over devices and forward passes.

    batch_size: maximum samples per forward pass on a device. micro_batch_size: maximum samples per forward pass in a
    process, which has several devices with DataParallel. grad_accum_steps: forward passes per optimizer step.
    global_batch_size: samples per optimizer step over all devices.
    """

    batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    global_batch_size: int


def split_batch(
    batch_size: int,
    grad_accum_steps: int,
    global_batch_size: int | None,
    num_devices: int,
    world_size: int,
    num_parts: int = 0,
) -> BatchSplit:
    """Computes the split of a global batch from the batch flags. num_parts: value of `--parts`, or 0.

    If `global_batch_size` is given, uses the fewest accumulation steps with which no device gets more than `batch_size`
    samples per forward.
    """
    if num_parts:
        global_batch_size = global_batch_size or batch_size * num_parts
        part = -(-global_batch_size // num_parts)
        return BatchSplit(part, part, num_parts // num_devices, global_batch_size)
    devices_per_process = num_devices // world_size
    if global_batch_size is None:
        global_batch_size = batch_size * grad_accum_steps * num_devices
    else:
        share = -(-global_batch_size // num_devices)
        grad_accum_steps = -(-share // batch_size)
        batch_size = -(-share // grad_accum_steps)
    return BatchSplit(batch_size, batch_size * devices_per_process, grad_accum_steps, global_batch_size)
