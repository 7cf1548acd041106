"""What an optimizer step came to, and how the host learns of it without waiting for the device at every step."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.loop.host_copy import Arrival
from trainer.loop.plan import PlannedStep
from trainer.task import Sums

GROUP_SIZE = 32
"""Steps that are looked at together. A GPU's results are looked at a group later, when they have long since arrived."""


class StepResult(NamedTuple):
    """Tensors are on the device.

    sums: of this process's samples. grad_norm: of the whole gradient, before clipping. applied: whether the step
    changed anything, which it does if the norm is finite. alarm: whether the user has to know that it did not; both are
    plain bools where the host knows them without waiting, on the CPU. The last three are the same on every process.
    """

    sums: Sums
    grad_norm: Tensor
    applied: bool | Tensor
    alarm: bool | Tensor


class StepRecord(NamedTuple):
    """A step with its place. number: of the run, from 1."""

    number: int
    planned: PlannedStep
    result: StepResult


class StepResults:
    """Keeps the records of steps whose outcome the host does not know yet.

    at_once: the results are in host memory and cost nothing to look at, as on the CPU. Otherwise they are copied
    there in groups, and a group is looked at when the next one is full. When that happens is a function of the number
    of steps, so all processes see the same records at the same step.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._new: list[StepRecord] = []
        self._sent: list[StepRecord] = []
        self._alarms: Arrival | None = None

    def add(self, record: StepRecord) -> None:
        self._new.append(record)

    def take_alarms(self, wait: bool) -> list[StepRecord]:
        """The records that are known by now to be alarming, in order; each is returned once.

        wait: look at all of them, and wait for the device if need be.
        """
        if self._at_once:
            found = [record for record in self._new if record.result.alarm]
            self._new.clear()
            return found
        found = []
        if wait or len(self._new) == GROUP_SIZE:
            found = self._receive()
            self._send()
        return found + self._receive() if wait else found

    def _send(self) -> None:
        self._sent, self._new = self._new, []
        if not self._sent:
            return
        self._alarms = Arrival(torch.stack([torch.as_tensor(record.result.alarm) for record in self._sent]))

    def _receive(self) -> list[StepRecord]:
        if self._alarms is None:
            return []
        found = [record for record, alarm in zip(self._sent, self._alarms.content(), strict=True) if alarm]
        self._sent, self._alarms = [], None
        return found
