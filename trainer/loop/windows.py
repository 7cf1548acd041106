"""Prefetches micro-batches for training and evaluation, and sums their loss-term counts over all processes."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, tee
from typing import Any, NamedTuple, TypeVar

from trainer.common.errors import UserError
from trainer.failure.signals import StopRequest
from trainer.loading.batches import Batch, WeightedBatch, weighted
from trainer.loading.order import SampleKeys, evaluation_keys, split_global_batch
from trainer.loading.workers import BatchLoader
from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.plan import Plan, PlannedStep
from trainer.loop.progress import Progress
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy


class StopRequested(Exception):
    """Raised on all processes at the same step after a process was asked to stop."""


class TimeIsUp(StopRequested):
    """Raised when the run has trained for `--max-minutes` by rank 0's clock."""


class Window(NamedTuple):
    """Accumulation window: the micro-batches of one optimizer step on this process.

    weight: number of loss terms in this process's share of the global batch; with `--parts`, a list of one number per
    part, 0 for parts of other processes. num_samples: samples in this process's share, without placeholder batches.
    """

    step: PlannedStep
    micro_batches: list[WeightedBatch]
    weight: float | list[float]
    num_samples: int


class Agreed(NamedTuple):
    """Values summed over all processes for one accumulation window or evaluation batch.

    weight: number of loss terms. num_stop_requests: number of processes asked to stop. time_is_up, save: 1 if rank 0's
    clock asks to stop or to save, else 0.
    """

    weight: float
    num_stop_requests: float
    time_is_up: float = 0.0
    save: float = 0.0


T = TypeVar("T", Window, WeightedBatch)
NO_CLOCK = (False, False)


def training_windows(
    plan: Plan,
    progress: Progress,
    micro_batch_sizes: Sequence[int],
    loader: BatchLoader,
    strategy: Strategy,
    log: RunLog | SilentLog,
    ahead: bool,
) -> Iterator[Window]:
    """Yields this process's share of each remaining global batch of the epoch.

    micro_batch_sizes: maximum samples per forward, by phase. ahead: whether to prefetch a later epoch with idle
    workers. Raises UserError if a batch of `Task.order` is too large for `--parts`.
    """
    shards = strategy.shards

    def keys_of(step: PlannedStep) -> list[SampleKeys]:
        samples = plan.orders[step.phase].samples(step.epoch, step.start, step.end)
        size, part = micro_batch_sizes[step.phase], step.progress / plan.total
        shares = (split_global_batch(samples, shard, size, step.epoch, step.phase, part) for shard in shards)
        return [*chain.from_iterable(shares)]

    planned, to_load = tee((step, keys_of(step)) for step in plan.rest_of_epoch(progress.position, progress.step))
    batches = loader((key for _, keys in to_load for key in keys), ahead)
    return _windows(planned, batches, strategy, log)


def _windows(
    planned: Iterable[tuple[PlannedStep, list[SampleKeys]]],
    batches: Iterator[Batch],
    strategy: Strategy,
    log: RunLog | SilentLog,
) -> Iterator[Window]:
    shards, num_parts, group = strategy.shards, strategy.num_parts, strategy.group
    for step, keys in planned:
        group.activity.enter("data loading")
        started = time.perf_counter()
        own = [weighted(next(batches), its.placeholder) for its in keys]
        log.data_wait_seconds += time.perf_counter() - started
        if len(own) > len(shards) and num_parts:
            whole = f"the task's order has a global batch of {step.end - step.start} samples"
            raise UserError(f"--parts {num_parts}: {whole}, more than --parts times --batch-size; raise either flag")
        weight: float | list[float] = sum(each.weight for each in own)
        if num_parts:
            weight = [0.0] * num_parts
            for (part, _), each in zip(shards, own, strict=True):
                weight[part] = each.weight
        if len(own) == 1:  # several micro-batches would occupy device memory long before their use
            own = [own[0]._replace(batch=strategy.upload(own[0].batch))]
        yield Window(step, own, weight, sum(each.num_samples for each in own))


def evaluation_batches(
    loader: BatchLoader, num_samples: int, batch_size: int, strategy: Strategy, ahead: bool = False
) -> Iterator[WeightedBatch]:
    """Yields this process's batches of a data set; all processes get the same number of batches.

    ahead: whether to prefetch for a later evaluation with idle workers.
    """
    of_shards = (evaluation_keys(num_samples, shard, batch_size) for shard in strategy.shards)
    own, to_load = tee(chain.from_iterable(zip(*of_shards, strict=True)))
    batches = loader(to_load, ahead)

    def one_by_one() -> Iterator[WeightedBatch]:
        for keys in own:
            strategy.group.activity.enter("data loading of the evaluation")
            batch = weighted(next(batches), keys.placeholder)
            yield batch._replace(batch=strategy.upload(batch.batch))

    return one_by_one()


def agree_ahead(
    work: Iterable[T], group: Group, stop: StopRequest, clock: Callable[[], tuple[bool, bool]] | None = None
) -> Iterator[tuple[T, Agreed]]:
    """Yields each accumulation window or evaluation batch with values summed over all processes.

    clock: returns, on rank 0, whether time is up and whether a checkpoint is due. Raises StopRequested once any process
    was asked to stop, and TimeIsUp once time is up.

    Starts each all-reduce one window early, to hide its latency. Stops within two windows of a request.
    """
    waiting: tuple[T, Callable[[], Sequence[float]]] | None = None
    for piece in chain(work, (None,)):
        pending = None
        if piece is not None:
            asked = stop.signal_number is not None
            weights: Any = piece.weight if isinstance(piece.weight, list) else [piece.weight]
            pending = group.start_sum([*weights, asked, *(clock() if clock is not None else NO_CLOCK)])
        if waiting is not None:
            summed = waiting[1]()
            agreed = Agreed(math.fsum(summed[:-3]), *summed[-3:])
            if agreed.num_stop_requests > 0:
                raise StopRequested
            if agreed.time_is_up > 0:
                raise TimeIsUp
            yield waiting[0], agreed
        waiting = (piece, pending) if piece is not None and pending is not None else None
