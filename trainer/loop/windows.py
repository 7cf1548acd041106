"""What each step and each evaluation forward works on, fetched ahead and agreed on by all processes."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import tee
from typing import NamedTuple, TypeVar

from trainer.loading.batches import WeightedBatch, weighted
from trainer.loading.order import SampleKeys, evaluation_keys, num_micro_batches, split_global_batch
from trainer.loop.plan import PlannedStep
from trainer.loop.run import Run


class StopRequested(Exception):
    """One of the processes was asked to stop; all of them learn of it at the same step."""


class TimeIsUp(StopRequested):
    """The run has used up its `--max-minutes`, by the clock of the main process."""


class Window(NamedTuple):
    """The micro-batches of one optimizer step on this process. weight: loss terms of this process's part."""

    step: PlannedStep
    micro_batches: list[WeightedBatch]
    weight: float

    @property
    def num_samples(self) -> int:
        """Of this process's part, without placeholders."""
        return sum([each.num_samples for each in self.micro_batches])


class Agreed(NamedTuple):
    """What the processes tell each other of a piece of work, summed.

    weight: loss terms. num_stop_requests: of processes that were asked to stop. time_is_up, save: whether the clock of
    the main process says so; 0 or 1.
    """

    weight: float
    num_stop_requests: float
    time_is_up: float = 0.0
    save: float = 0.0


T = TypeVar("T", Window, WeightedBatch)


def training_windows(run: Run) -> Iterator[Window]:
    """This process's part of each global batch that is left in the epoch."""
    position, world_size = run.progress.position, run.group.world_size
    sizes = [split.micro_batch_size for split in run.memory.splits]
    steps, loaded_ahead = tee(run.plan.rest_of_epoch(position, run.progress.step))
    all_keys = (keys for step in loaded_ahead for keys in _own_keys(run, step, sizes[step.phase]))
    batches = _loaded(run, "train", all_keys)
    for step in steps:
        run.group.activity.enter("data loading")
        started = time.perf_counter()
        num_batches = num_micro_batches(step.end - step.start, world_size, sizes[step.phase])
        micro_batches = [next(batches) for _ in range(num_batches)]
        run.log.data_wait_seconds += time.perf_counter() - started
        yield Window(step, micro_batches, sum(each.weight for each in micro_batches))


def _loaded(run: Run, split: str, keys: Iterable[SampleKeys]) -> Iterator[WeightedBatch]:
    own, ahead = tee(keys)
    for batch, its in zip(run.loaders[split](ahead), own, strict=True):
        yield weighted(batch, its.placeholder)


def _own_keys(run: Run, step: PlannedStep, micro_batch_size: int) -> list[SampleKeys]:
    samples = run.plan.orders[step.phase].samples(step.epoch, step.start, step.end)
    share = step.progress / run.plan.total
    shard = run.group.rank, run.group.world_size
    return split_global_batch(samples, shard, micro_batch_size, step.epoch, step.phase, share)


def evaluation_batches(run: Run, split: str) -> Iterator[WeightedBatch]:
    """This process's batches of a data set; equally many on every process."""
    num_samples = len(run.task.splits()[split])
    size = run.settings.eval_batch_size * run.strategy.num_replicas
    shard = run.group.rank, run.group.world_size
    batches = _loaded(run, split, evaluation_keys(num_samples, shard, size))
    while True:
        run.group.activity.enter("data loading of the evaluation")
        batch = next(batches, None)
        if batch is None:
            return
        yield batch


def agree_ahead(run: Run, work: Iterator[T], is_training: bool = False) -> Iterator[tuple[T, Agreed]]:
    """Adds to each piece of work what all processes say of it.

    is_training: whether the main process's clock may end the work and ask for checkpoints. Raises StopRequested once
    any process was asked to stop, TimeIsUp once the clock ends it.

    The exchange starts one piece ahead of its use, so that nobody waits for it; a request is therefore honoured within
    two of them.
    """
    asks_clock = is_training and run.group.is_main
    waiting: tuple[T, Callable[[], Sequence[float]]] | None = None
    for piece in work:
        clock = (run.time_is_up, run.save_is_due) if asks_clock else (False, False)
        pending = run.group.start_sum(Agreed(piece.weight, bool(run.stop), *clock))
        if waiting is not None:
            yield waiting[0], _agreed(waiting[1]())
        waiting = piece, pending
    if waiting is not None:
        yield waiting[0], _agreed(waiting[1]())


def _agreed(sums: Sequence[float]) -> Agreed:
    agreed = Agreed(*sums)
    if agreed.num_stop_requests > 0:
        raise StopRequested
    if agreed.time_is_up > 0:
        raise TimeIsUp
    return agreed
