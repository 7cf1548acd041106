"""How far a run has come: all that changes while training, apart from weights and moments."""

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
    """How far a run has come in this process: what a checkpoint keeps, and what it does not hold, or in another form.

    last_save: optimizer steps done at the last checkpoint.
    totals: of each phase, sums over this process's share of the steps since the last report.
    own_samples: of `samples`, those that this process's totals cover.
    new_totals: makes totals of nothing.
    clock: when it was last read; None before the first reading, which starts the time.
    """

    last_save: int = 0
    totals: dict[str, Totals] = field(default_factory=dict)
    own_samples: int = 0
    new_totals: Callable[[], Totals] = Totals
    clock: float | None = None

    def copied(self) -> "Progress":
        """A copy with the same totals; `copy.copy` takes three times as long, in every step."""
        twin = object.__new__(Progress)
        vars(twin).update(vars(self))
        return twin

    def start_epoch(self, epoch: int, phases: Sequence[str]) -> None:
        """epoch: number of completed ones."""
        self.position = Position(epoch, others=self.position.others)
        self.start_segment(phases)

    def start_segment(self, phases: Sequence[str]) -> None:
        self.last_report = self.step
        self.totals = {phase: self.new_totals() for phase in phases}
        self.reported = dict.fromkeys(phases, (0.0, 0.0))
        self.samples = self.own_samples = 0
        self.misses_samples = False

    def advance(self, position: Position, samples: int = 0, own_samples: int = 0) -> None:
        """After an optimizer step. samples, own_samples: those added to the totals, of all processes and of this."""
        self.position = position
        self.step += 1
        self.samples += samples
        self.own_samples += own_samples

    def where(self, plan: Plan, group: Group, phase: str = "", progress: float | None = None) -> At:
        """Where the run is, for a task. progress: of the step of a phase, in the unit of `Plan.total`."""
        is_in_epochs, position = plan.max_steps is None, self.position
        step = plan.steps_done(position) if is_in_epochs else self.step  # whatever batch sizes the run had
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
        """Adds the time since the last reading to `train_seconds`."""
        now = time.monotonic()
        self.train_seconds += now - self.clock if self.clock is not None else 0.0
        self.clock = now

    def judge(self, value: float, mode: str) -> bool:
        """Takes note of the monitored value of a validation; True if it is the best so far. mode: "max" or "min"."""
        sign = 1 if mode == "max" else -1
        is_best = not math.isnan(value) and (self.best is None or sign * value > sign * self.best.value)
        if is_best:
            self.best = Best(self.position.epoch, value, self.step)
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best
