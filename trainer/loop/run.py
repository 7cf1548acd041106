"""A training run: the objects that one process trains with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainer.checkpoint.background import BackgroundSaver
from trainer.checkpoint.directory import RunDirectory
from trainer.failure.signals import StopRequest
from trainer.flags import CheckpointFlags, RunFlags
from trainer.loading.batches import WeightedBatch
from trainer.loading.order import Position
from trainer.loading.workers import BatchLoader, Workers
from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.learner import Learner
from trainer.loop.memory import MemoryGuard
from trainer.loop.plan import Plan
from trainer.loop.progress import Progress
from trainer.loop.schedule import LearningRate
from trainer.loop.watch import Watch
from trainer.loop.windows import Window, evaluation_batches, training_windows
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.task import Task, validation_sets

ROUND_S = 0.5
"""Seconds that rank 0 waits for a write before it answers the other ranks."""


@dataclass
class Run:
    """One process's view of a training run.

    memory: splits each phase's global batches to fit device memory.
    directory, saver: used on rank 0 only.
    facts: checkpoint entries for the next start (flags, versions, batch sizes).
    model_outline: dtype and shape of each saved weight and buffer of the newly built model.
    prepared: iterators over prefetched batches, by name of the validation set, or "train" for the next epoch.
    tried_saving: phases whose state has been checked by `try_saving`.
    patience: evaluations without improvement after which training stops; 0 disables early stopping.
    eval_batch_size: samples per device per forward in evaluations.
    """

    task: Task
    strategy: Strategy
    learner: Learner
    plan: Plan
    memory: MemoryGuard
    learning_rate: LearningRate
    workers: Workers
    loaders: dict[str, BatchLoader]
    directory: RunDirectory
    saver: BackgroundSaver
    settings: RunFlags
    saving: CheckpointFlags
    patience: int
    eval_batch_size: int
    watches: list[Watch]
    facts: dict[str, Any]
    model_outline: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    prepared: dict[str, Iterator[Any]] = field(default_factory=dict)
    tried_saving: set[str] = field(default_factory=set)
    log: RunLog | SilentLog = field(default_factory=SilentLog)
    stop: StopRequest = field(default_factory=StopRequest)
    progress: Progress = field(default_factory=Progress)

    @property
    def group(self) -> Group:
        return self.strategy.group

    @property
    def is_complete(self) -> bool:
        """Returns whether all epochs or steps are done and reported, or early stopping has ended the run."""
        if self.is_out_of_patience:
            return True
        # the position moves to the next epoch only in the report
        return self.is_through and (self.plan.max_steps is None or self.progress.last_report == self.progress.step)

    @property
    def is_through(self) -> bool:
        return self.plan.is_through(self.progress.position.epoch, self.progress.step)

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self.patience <= self.progress.evaluations_since_best

    def windows(self, progress: Progress, ahead: bool = False) -> Iterator[Window]:
        sizes = [split.micro_batch_size for split in self.memory.splits]
        return training_windows(self.plan, progress, sizes, self.loaders["train"], self.strategy, self.log, ahead)

    def evaluation_batches(self, split: str, ahead: bool = False) -> Iterator[WeightedBatch]:
        size = self.eval_batch_size * self.strategy.num_replicas
        return evaluation_batches(self.loaders[split], len(self.task.splits()[split]), size, self.strategy, ahead)

    def prepare_validation(self) -> None:
        """Lets idle workers prefetch the validation sets."""
        for name in validation_sets(self.task.splits()):
            self.prepared[name] = self.prepared.get(name) or self.evaluation_batches(name, ahead=True)

    def prepare_next_epoch(self) -> None:
        """Lets idle workers prefetch the next epoch, unless the task has an `on_epoch_start`, which may change data."""
        start = Position(self.progress.position.epoch + 1, others=self.progress.position.others)
        if self.plan.is_through(start.epoch, self.progress.step):
            return
        if type(self.task).on_epoch_start is Task.on_epoch_start:
            self.prepared["train"] = self.windows(replace(self.progress, position=start), ahead=True)

    def await_saver(self, done_within: Callable[[float], bool]) -> None:
        """Calls `saver.wait` or `saver.finish` on rank 0 until it returns True. All processes must call this method.

        Other ranks wait for one call at a time, because a write may take longer than `--dist-timeout-s`.
        """
        while not self.group.on_main(lambda: done_within(ROUND_S)):
            self.group.activity.enter("writing a checkpoint")

    def close(self) -> None:
        """Stops the workers, waits for a pending checkpoint write, and closes the log."""
        self.workers.close()
        with closing(self.log):
            unsaved = self.saver.end()
            if unsaved is not None:
                self.log.say(unsaved)
