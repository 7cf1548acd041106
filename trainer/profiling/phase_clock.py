"""Measures the time of the training loop's phases, by observing which activity the loop reports."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from trainer.failure.heartbeat import EXCHANGE, CurrentActivity
from trainer.loop import memory
from trainer.loop.learner import Learner
from trainer.loop.watch import Log
from trainer.parallel.devices import queue_of
from trainer.parallel.strategy import Strategy

DATA, COPY, FORWARD, BACKWARD = "waiting for data", "copy", "forward", "backward"
COMMUNICATION, OPTIMIZER, SAVING, REST = "communication", "optimizer", "saving", "logging and the rest"
PHASES = (DATA, COPY, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, SAVING, REST)
"""Phases of a step, in order."""

_PHASE_OF = {
    "data loading": DATA,
    "forward": FORWARD,
    "backward": BACKWARD,
    memory.OPTIMIZER: OPTIMIZER,
    EXCHANGE: COMMUNICATION,
    "waiting for rank 0": COMMUNICATION,
    "saving": SAVING,
}
"""Maps activities that the loop reports to phases; all other activities belong to the phase REST."""


class PhaseClock:
    """Records the start of each phase; a phase lasts until the next one starts.

    spans: whether to mark the phases in a torch.profiler trace, too.
    """

    def __init__(self, device: torch.device, activity: CurrentActivity, spans: bool = False) -> None:
        self._queue, self._loop = queue_of(device), activity
        self._spans = spans
        self._span = ExitStack()
        self._borders: list[tuple[str, int, Any]] = []
        self.enter(REST)

    def enter(self, phase: str) -> None:
        self._borders.append((phase, self._loop.step, self._queue.instant()))
        self._span.close()
        if self._spans:
            self._span.enter_context(torch.profiler.record_function(phase))

    def around(self, within: str, after: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the phase `within`, calls a function, then starts the phase `after`; returns the function's result."""
        self.enter(within)
        result = function(*args, **kwargs)
        self.enter(after)
        return result

    def stop(self) -> np.ndarray:
        """Waits for the device; returns the time since creation in ms, divided into steps (rows) and phases (columns).

        A step lasts until the next step starts. The wait for a step's data counts towards that step, although the data
        are fetched during the previous step.
        """
        self.enter(REST)
        self._span.close()
        before = self._borders[0][1]
        steps = np.zeros((self._loop.step - before, len(PHASES)))
        next_to_load = iter(range(len(steps)))
        for (phase, step, begin), (_, _, end) in pairwise(self._borders):
            row = next(next_to_load) if phase == DATA else max(step - before - 1, 0)
            steps[row, PHASES.index(phase)] += 1e3 * self._queue.seconds(begin, end)
        return steps


@contextmanager
def watched(strategy: Strategy, learner: Learner, log: Log, spans: bool = False) -> Iterator[PhaseClock]:
    """Yields a clock that measures the loop's phases until the end of the context.

    Each activity starts a phase; so do copies to the device, optimizer updates, collectives, logging and seeding.
    """
    group, activity = strategy.group, strategy.group.activity
    clock = PhaseClock(strategy.device, activity, spans)
    enter = activity.enter

    def entered(phase: str) -> None:
        enter(phase)
        clock.enter(_PHASE_OF.get(phase, REST))

    with ExitStack() as stack:
        stack.enter_context(replaced(activity, "enter", entered))
        for owner, name, within, after in (
            (strategy, "seed_dropout", REST, REST),
            (strategy, "to_device", COPY, FORWARD),
            (group, "start_sum", COMMUNICATION if group.world_size > 1 else REST, REST),
            (learner, "update", OPTIMIZER, REST),
            (log, "step", REST, REST),
        ):
            stack.enter_context(replaced(owner, name, partial(clock.around, within, after, getattr(owner, name))))
        yield clock


@contextmanager
def replaced(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of a single object until the end of the context."""
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)
