"""Protocol for observers of training (`Watch`), and the records that they receive."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.plan import PlannedStep, SampleOrder
from trainer.loop.precision import StepOutcome
from trainer.loop.progress import Progress
from trainer.task import Sums

Log = RunLog | SilentLog


Place = Literal["forward", "update"]
"""Points of a step: "forward", before forwards, with the last step's weights; "update", before weights change."""


class StepRecord(NamedTuple):
    """Record of a finished step. number: optimizer step of the run, from 1. order: sample order of the step's phase.

    sums: sums over this process's samples, on the device; (parts, ...) with `--parts`.
    """

    number: int
    planned: PlannedStep
    order: SampleOrder
    sums: Sums
    outcome: StepOutcome


class Watch:
    """Base class of observers of training; its methods do nothing unless overridden.

    All processes have the same observers and call them at the same steps, so observers may run collectives. log:
    receives messages to the user.
    """

    def remarks(self) -> Sequence[str]:
        """Returns messages to show to the user before training."""
        return ()

    def begin(self, progress: Progress) -> None:
        """Called when training begins."""

    def resume(self) -> None:
        """Called before the first step, and before the first step after each `pause`."""

    def pause(self) -> None:
        """Called before each report of metrics."""

    def at(self, place: Place) -> None:
        """Called when a step reaches `place`, and again after it has moved weights back or run out of memory."""

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        """Called after a step, when `progress` already counts it. record: the step, or None if it had no loss terms."""

    def settle(self, log: Log) -> None:
        """Waits for the device, and reports on all finished steps."""

    def before_save(self, step: int, log: Log) -> None:
        """Called before a checkpoint is saved. step: optimizer steps done."""


class Remarks(Watch):
    """Observer that logs another object's messages. take: returns the messages added since its last call."""

    def __init__(self, take: Callable[[], Sequence[str]]) -> None:
        self._take = take

    def remarks(self) -> Sequence[str]:
        return self._take()

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        for line in self._take():
            log.say(line)


def settle(watches: Sequence[Watch], log: Log) -> None:
    """Waits for the device, and lets all observers report on finished steps."""
    for watch in watches:
        watch.settle(log)
