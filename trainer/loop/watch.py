"""The protocol of observers of training, which do not take part in it, and the records they see."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.plan import PlannedStep, SampleOrder
from trainer.loop.progress import Progress
from trainer.task import Sums

Log = RunLog | SilentLog


Place = Literal["forward", "update"]
"""Points of a step: before its first forward, or with all gradients before the update."""


class StepResult(NamedTuple):
    """Result of an optimizer step; tensors are on the device.

    sums: of this process's samples; with `--parts` (parts, ...), one row per part if it has several. grad_norm: global,
    before clipping. applied: whether the step changed anything, which a finite norm decides. alarm: whether to tell the
    user that it did not; both are plain bools on the CPU, where the host need not wait. The last three agree on all
    processes.
    """

    sums: Sums
    grad_norm: Tensor
    applied: bool | Tensor
    alarm: bool | Tensor


class StepRecord(NamedTuple):
    """A step and its place. number: in the run, from 1. order: of its phase's samples."""

    number: int
    planned: PlannedStep
    order: SampleOrder
    result: StepResult


class Watch:
    """Observes training; methods do nothing unless overridden.

    All processes have the same watches and call them at the same steps, so watches may run collectives. log: for
    messages to the user.
    """

    def remarks(self) -> Sequence[str]:
        """Returns lines for the user before training."""
        return ()

    def begin(self, progress: Progress) -> None:
        """Runs when training begins."""

    def resume(self) -> None:
        """Runs before the first step, and before the first step after a `pause`."""

    def pause(self) -> None:
        """Runs before a report."""

    def at(self, place: Place) -> None:
        """Runs at a point of a step, again if the step is retried after an out-of-memory error."""

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        """Runs after a step. progress: after it. record: None if no sample had a weight, so nothing changed."""

    def settle(self, log: Log) -> None:
        """Waits for the device, and reports on all steps so far."""

    def before_save(self, step: int, log: Log) -> None:
        """Runs before a checkpoint. step: optimizer steps done."""


class Remarks(Watch):
    """Logs lines of an object that is not a watch. take: returns its new lines."""

    def __init__(self, take: Callable[[], Sequence[str]]) -> None:
        self._take = take

    def remarks(self) -> Sequence[str]:
        return self._take()

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        for line in self._take():
            log.say(line)


def settle(watches: Sequence[Watch], log: Log) -> None:
    """Waits for the device and lets all watches report on the steps so far."""
    for watch in watches:
        watch.settle(log)
