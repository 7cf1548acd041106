"""The last optimizer step that is known to be applied, also where the device is behind the host.

A process that lost the others in the middle of a step still has what the step before left (Gupta et al., Just-In-Time
Checkpointing, EuroSys 2024). On a GPU the host has gone ahead, and the steps that it has enqueued wait behind an
exchange that never ends. So a step leaves marks among the kernels, as events of CUDA.
"""

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.loop.progress import Progress

DRAINS_WITHIN_S = 2.0
"""So long the device may take for what waits for no other process."""


Mark = Callable[[], bool]
"""Whether a moment in the work of the device has come."""


@dataclass(eq=False)
class AppliedStep:
    """progress: as it was after the step. applied: when the device had done it.

    Of the next one: forward, when it began; changes, when its optimizer began to change the weights.
    """

    progress: Progress
    applied: Mark
    forward: Mark | None = None
    changes: Mark | None = None


class LastStep:
    """Set by the thread that trains, and read by any. first: the optimizer steps done when training began."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_behind = device, device.type == "cuda"
        self._steps: deque[AppliedStep] = deque()
        self.first = 0

    def begin(self, progress: Progress) -> None:
        """Where training begins."""
        self.first = progress.step
        self._steps.clear()
        self.applied(progress)

    def forward(self) -> None:
        """A step begins. The kept buffers are those from before it."""
        if self._steps:
            self._steps[-1].forward = self._mark()

    def changes(self) -> None:
        """Weights and moments are about to change."""
        if self._steps:
            self._steps[-1].changes = self._mark()

    def applied(self, progress: Progress) -> None:
        """A step is done."""
        self._steps.append(AppliedStep(copy.copy(progress), self._mark()))
        while len(self._steps) > 1 and self._steps[1].applied():
            self._steps.popleft()

    def find(self) -> tuple[AppliedStep, bool] | None:
        """The step whose weights and moments the device has now, and whether the forward of the next one has begun.

        None before training, and while an optimizer is at work.
        """
        self._drain()
        done = [step for step in list(self._steps) if step.applied()]
        if not done or _has_come(done[-1].changes):
            return None
        return done[-1], _has_come(done[-1].forward)

    def _drain(self) -> None:
        """Lets the device do what it can do without other processes."""
        deadline = time.monotonic() + DRAINS_WITHIN_S
        if self._is_behind:
            stream = torch.cuda.default_stream(self._device)
            while not stream.query() and time.monotonic() < deadline:
                time.sleep(0.01)

    def _mark(self) -> Mark:
        if not self._is_behind:
            return _now
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.query


def _now() -> bool:
    """The mark of a device that is never behind the host."""
    return True


def _has_come(mark: Mark | None) -> bool:
    return mark is not None and mark()
