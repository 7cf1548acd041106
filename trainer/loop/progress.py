"""How far a run has come: all that changes while training, apart from weights and moments."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.loading.order import Position
from trainer.loop.totals import Totals


@dataclass
class Best:
    """The best validation score so far.

    epoch, step: completed epochs and optimizer steps when it was reached.
    """

    epoch: int
    value: float
    step: int


@dataclass
class Progress:
    """What a checkpoint keeps of a run besides its model and optimizers.

    evaluations_since_best: what early stopping looks at.
    last_report: optimizer steps done at the last report, which an epoch's end and every evaluation make.
    last_save: the same of the last checkpoint, which itself does not hold it.
    train_seconds: wall time of training, evaluation and saving included, over all sessions, as of the last
    `read_clock`, which every save makes.
    totals: of each phase, sums over this process's share of the steps since the last report.
    reported: of each phase, the loss and the weight of its totals over all processes that the log has shown.
    samples, own_samples: those that the totals of all processes cover, and those of this one.
    misses_samples: whether that is not all since the last report, because other processes were lost with their totals.
    skipped_steps: optimizer steps left out because they were not finite.
    skipped_in_a_row: the last step skipped, and how many in a row that were.
    clock: when it was last read; None before the first reading, which starts the time.
    """

    position: Position = field(default_factory=Position)
    step: int = 0
    best: Best | None = None
    evaluations_since_best: int = 0
    last_report: int = 0
    last_save: int = 0
    train_seconds: float = 0.0
    totals: dict[str, Totals] = field(default_factory=dict)
    reported: dict[str, tuple[float, float]] = field(default_factory=dict)
    samples: int = 0
    own_samples: int = 0
    misses_samples: bool = False
    skipped_steps: int = 0
    skipped_in_a_row: tuple[int, int] = (0, 0)
    clock: float | None = None

    def __copy__(self) -> "Progress":
        """As without this method, in a third of the time: one is made after every step."""
        twin = object.__new__(Progress)
        twin.__dict__.update(self.__dict__)
        return twin

    def start_epoch(self, epoch: int, phases: Sequence[str]) -> None:
        """epoch: number of completed ones."""
        self.position = Position(epoch, others=self.position.others)
        self.start_segment(phases)

    def start_segment(self, phases: Sequence[str]) -> None:
        """After a report."""
        self.last_report = self.step
        self.totals = {phase: Totals() for phase in phases}
        self.reported = dict.fromkeys(phases, (0.0, 0.0))
        self.samples = self.own_samples = 0
        self.misses_samples = False

    def count(self, samples: int, own_samples: int) -> None:
        """Those of a step that was added to the totals: of all processes, and of this one."""
        self.samples += samples
        self.own_samples += own_samples

    def advance(self, position: Position) -> None:
        """After an optimizer step."""
        self.position = position
        self.step += 1

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
