"""Progress of a run: all state that changes in training except the model's and the optimizers' states."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer.checkpoint.format import Best, SavedProgress
from trainer.loading.order import Position
from trainer.loop.plan import Plan
from trainer.loop.totals import Totals
from trainer.parallel.group import Group
from trainer.task import At


@dataclass
class Progress(SavedProgress):
    """A run's progress in this process. Checkpoints contain only the fields of `SavedProgress`.

    last_save: optimizer steps done at the last checkpoint. totals: each phase's sums over this process's samples since
    the last report of metrics. own_samples: number of samples in `totals`. new_totals: function that creates empty
    totals. clock: value of `time.monotonic()` at the last update of `train_seconds`, or None before training.
    """

    last_save: int = 0
    totals: dict[str, Totals] = field(default_factory=dict)
    own_samples: int = 0
    new_totals: Callable[[], Totals] = Totals
    clock: float | None = None

    def start_epoch(self, epoch: int, phases: Sequence[str]) -> None:
        """Moves to the start of an epoch and empties the totals. epoch: number of completed epochs."""
        self.position = Position(epoch, others=self.position.others)
        self.start_segment(phases)

    def start_segment(self, phases: Sequence[str]) -> None:
        self.last_report = self.step
        self.totals = {phase: self.new_totals() for phase in phases}
        self.reported = dict.fromkeys(phases, (0.0, 0.0))
        self.samples = self.own_samples = 0
        self.misses_samples = False

    def advance(self, position: Position, samples: int = 0, own_samples: int = 0) -> None:
        """Advances by one optimizer step. samples, own_samples: the step's samples, in total and on this process."""
        self.position = position
        self.step += 1
        self.samples += samples
        self.own_samples += own_samples

    def where(self, plan: Plan, group: Group, phase: str = "", progress: float | None = None) -> At:
        """Describes the run's position to a task. progress: training progress to show, or None for the current one."""
        is_in_epochs, position = plan.max_steps is None, self.position
        step = plan.steps_done(position) if is_in_epochs else self.step  # as if batch sizes had not changed
        if progress is None:
            progress = plan.epochs_done(position) if is_in_epochs else step
        share = progress / plan.total if plan.total else 0.0
        return At(
            step, plan.num_steps, position.epoch, share, phase, "train", group.world_size, group.rank, self.task_state
        )

    @property
    def seconds_since_reading(self) -> float:
        return time.monotonic() - self.clock if self.clock is not None else 0.0

    def read_clock(self) -> None:
        """Increases `train_seconds` by the time since the previous call."""
        self.train_seconds += self.seconds_since_reading
        self.clock = time.monotonic()

    def judge(self, value: float, mode: str) -> bool:
        """Records the monitored metric of a validation; returns whether it is the best so far. mode: "max" or "min"."""
        sign = 1 if mode == "max" else -1
        is_best = not math.isnan(value) and (self.best is None or sign * value > sign * self.best.value)
        if is_best:
            self.best = Best(self.position.epoch, value, self.step)
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best
