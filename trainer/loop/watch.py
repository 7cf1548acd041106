"""The protocol of whatever looks on while a run trains, and is not needed to train; and what it sees of a step."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.plan import PlannedStep, SampleOrder
from trainer.loop.progress import Progress
from trainer.task import Sums

Log = RunLog | SilentLog


Place = Literal["forward", "update"]
"""Where a step is: before its first forward, or with all gradients, before weights and moments change."""


class StepResult(NamedTuple):
    """What an optimizer step came to; the tensors are on the device.

    sums: of this process's samples; under `--parts` (parts, ...), a row for each part if it has several. grad_norm: of
    the whole gradient, before clipping. applied: whether the step changed anything, which it does if the norm is
    finite. alarm: whether the user has to know that it did not; both are plain bools where the host knows them without
    waiting, on the CPU. The last three are the same on every process.
    """

    sums: Sums
    grad_norm: Tensor
    applied: bool | Tensor
    alarm: bool | Tensor


class StepRecord(NamedTuple):
    """A step with its place. number: of the run, from 1. order: of its phase's samples."""

    number: int
    planned: PlannedStep
    order: SampleOrder
    result: StepResult


class Watch:
    """Looks on while a run trains; each method does nothing unless a watch has it.

    All processes of a run have the same watches and call them at the same steps, so a watch may exchange something with
    those of the other processes. log: where it says what the user should know.
    """

    def remarks(self) -> Sequence[str]:
        """Lines for the user, before training."""
        return ()

    def begin(self, progress: Progress) -> None:
        """Training begins."""

    def resume(self) -> None:
        """Steps follow, at first or after `pause`."""

    def pause(self) -> None:
        """A report follows, and no step for now."""

    def at(self, place: Place) -> None:
        """A step has come to a place. One that finds no memory is tried again, and comes there again."""

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        """A step is done. progress: after it. record: None where no sample had a weight, so that nothing changed."""

    def settle(self, log: Log) -> None:
        """The host is to wait for the device, so all there is to know of the steps so far can be asked now."""

    def before_save(self, step: int, log: Log) -> None:
        """A checkpoint is about to be made, after so many optimizer steps."""


class Remarks(Watch):
    """Says what something that is no watch has to tell the user. take: returns the lines that are new."""

    def __init__(self, take: Callable[[], Sequence[str]]) -> None:
        self._take = take

    def remarks(self) -> Sequence[str]:
        return self._take()

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        for line in self._take():
            log.say(line)


def settle(watches: Sequence[Watch], log: Log) -> None:
    """Has all watches look at the steps so far, and waits for the device."""
    for watch in watches:
        watch.settle(log)
