"""A run in progress: everything that one process trains with."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.checkpoint.background import BackgroundSaver
from trainer.checkpoint.directory import RunDirectory
from trainer.loading.batches import BatchLoader
from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.contract import checked_metrics
from trainer.loop.learner import Learner
from trainer.loop.memory import MemoryGuard
from trainer.loop.plan import Plan, PlannedStep
from trainer.loop.progress import Progress
from trainer.loop.schedule import LearningRate
from trainer.loop.watch import Watch
from trainer.parallel.group import Group
from trainer.parallel.signals import StopRequest
from trainer.parallel.strategy import Strategy
from trainer.task import Sums, Task


@dataclass(frozen=True)
class LoopSettings:
    """What the flags say about the loop itself. patience, save_every_steps, save_every_s, max_s: 0 is off.

    patience: evaluations. save_every_s: seconds from one checkpoint to the next. max_s: seconds of training.
    eval_batch_size: samples per device per forward in evaluation.
    """

    seed: int
    eval_start: bool
    patience: int
    save_every_steps: int
    save_every_s: float
    max_s: float
    log_interval: int
    eval_batch_size: int


@dataclass
class Run:
    """One process's view of a training run.

    memory: how the global batches of each phase are cut. directory, saver: used on the main process alone. facts: what
    a checkpoint records for the next start: flags, versions, batch arithmetic. model_outline: type and shape of each
    weight and buffer of a checkpoint, as the model was built. tried_saving: phases after whose first step it was tried.
    """

    task: Task
    strategy: Strategy
    learner: Learner
    plan: Plan
    memory: MemoryGuard
    learning_rate: LearningRate
    loaders: dict[str, BatchLoader]
    directory: RunDirectory
    saver: BackgroundSaver
    settings: LoopSettings
    watches: list[Watch]
    facts: dict[str, Any]
    model_outline: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    tried_saving: set[str] = field(default_factory=set)
    log: RunLog | SilentLog = field(default_factory=SilentLog)
    stop: StopRequest = field(default_factory=StopRequest)
    progress: Progress = field(default_factory=Progress)

    @property
    def group(self) -> Group:
        """The processes of the run."""
        return self.strategy.group

    @property
    def is_complete(self) -> bool:
        """Whether all epochs or steps are done, and their last report, or early stopping has ended them."""
        if self.is_out_of_patience:
            return True
        # An epoch ends with its report.
        return self.is_through and (self.plan.max_steps is None or self.progress.last_report == self.progress.step)

    @property
    def is_through(self) -> bool:
        """Whether all epochs or steps are done."""
        return self.plan.is_through(self.progress.position.epoch, self.progress.step)

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self.settings.patience <= self.progress.evaluations_since_best

    def learning_rate_of(self, step: PlannedStep) -> float:
        """That of the next step. Raises UserError when the task's own schedule is wrong."""
        rate, plan = self.learning_rate, self.plan
        if rate.factor_of_step is None:
            return rate.at(step.progress)
        # A run in epochs goes by its position, whatever batch sizes it had.
        num_done = plan.steps_done(self.progress.position) if plan.max_steps is None else self.progress.step
        return rate.at(step.progress, num_done)

    @property
    def time_is_up(self) -> bool:
        """Whether `--max-minutes` are used up, by this process's clock."""
        progress, limit_s = self.progress, self.settings.max_s
        return 0 < limit_s <= progress.train_seconds + progress.seconds_since_reading

    @property
    def save_is_due(self) -> bool:
        """Whether `--save-every-minutes` have passed since the last checkpoint, by this process's clock.

        Or a save would end this run, since another process has taken its directory over.
        """
        return self.directory.is_lost or 0 < self.settings.save_every_s <= self.progress.seconds_since_reading

    def metrics(self, sums: Mapping[str, Sums]) -> dict[str, float]:
        """Metrics of data sets, by names such as "val/accuracy"; all processes call it. sums: of `evaluate`, by set."""
        return {
            f"{split}/{name}": value for split, own in sums.items() for name, value in self._summarised(own).items()
        }

    def _summarised(self, sums: Sums) -> dict[str, float]:
        return self.group.on_main(lambda: checked_metrics(self.task, "summarise", self.task.summarise(sums)))

    def training_metrics(self) -> dict[str, float]:
        """Those of the steps since the last report, by name, such as "train/loss". All processes call it."""
        totals = {phase: self.progress.totals[phase].reduced(self.group) for phase in self.task.phases}
        is_own = type(self.task).summarise_training is not Task.summarise_training
        method = "summarise_training" if is_own else "summarise"

        def summarise() -> dict[str, float]:
            return {
                self.of_phase(f"train/{name}", phase): value
                for phase, sums in totals.items()
                if sums
                for name, value in checked_metrics(self.task, method, self.task.summarise_training(sums, phase)).items()
            }

        return self.group.on_main(summarise)

    def of_phase(self, metric: str, phase: str) -> str:
        """The name of a metric of training: "train/loss", or "train/generator/loss" where there are several phases."""
        folder, _, name = metric.rpartition("/")
        return "/".join(filter(None, [folder, phase, name])) if len(self.task.phases) > 1 else metric

    def close(self) -> None:
        """Ends workers, a write under way, and the log."""
        for loader in self.loaders.values():
            loader.close()
        with closing(self.log):
            unsaved = self.saver.end()
            if unsaved is not None:
                self.log.say(unsaved)
