"""How the host learns which optimizer steps were not finite, without waiting for the device at every step."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.loading.order import Position

LOOK_EVERY = 32
"""Steps of one group. A GPU's results are looked at a group later, when they have long since arrived."""


class Attempt(NamedTuple):
    """One optimizer step.

    step: its number, from 1. start: where its global batch begins; stop: where it ends, in samples of the phase.
    loss: this process's sum of losses. alarm: not finite if the step is to be reported; the same on every process.
    """

    step: int
    start: Position
    stop: int
    loss: Tensor
    alarm: Tensor


class Watch:
    """Keeps the attempts whose outcome the host does not know yet.

    at_once: the numbers are in host memory and cost nothing to look at, as on the CPU. Otherwise they are copied
    there in groups, and a group is looked at when the next one is full. When that happens is a function of the number
    of steps, so all processes see the same attempts at the same step.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._open: list[Attempt] = []
        self._sent: list[Attempt] = []
        self._alarms = torch.empty(0)
        self._arrived: torch.cuda.Event | None = None

    def add(self, attempt: Attempt) -> None:
        self._open.append(attempt)

    def failures(self, wait: bool) -> list[Attempt]:
        """The attempts that are known by now not to have been finite, in order; each is returned once.

        wait: look at all of them, and wait for the device if need be.
        """
        if self._at_once:
            found = [attempt for attempt in self._open if not math.isfinite(attempt.alarm.item())]
            self._open.clear()
            return found
        found = []
        if wait or len(self._open) == LOOK_EVERY:
            found = self._look()
            self._send()
        return found + self._look() if wait else found

    def forget(self) -> None:
        """Drops all attempts: training went back to before them."""
        self._open, self._sent = [], []

    def _send(self) -> None:
        self._sent, self._open = self._open, []
        if not self._sent:
            return
        alarms = torch.stack([attempt.alarm for attempt in self._sent])
        if alarms.is_cuda:
            self._alarms = torch.empty(alarms.shape, dtype=alarms.dtype, pin_memory=True)
            self._alarms.copy_(alarms, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._alarms = alarms

    def _look(self) -> list[Attempt]:
        if self._arrived is not None:
            self._arrived.synchronize()
        finite = torch.isfinite(self._alarms).tolist() if self._sent else []
        found = [attempt for attempt, good in zip(self._sent, finite, strict=True) if not good]
        self._sent = []
        return found
