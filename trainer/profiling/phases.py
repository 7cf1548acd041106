"""Where the time of the training loop goes: a clock that looks on while the loop says where it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.loop import memory
from trainer.loop.run import Run
from trainer.parallel.phase import EXCHANGE, CurrentPhase
from trainer.profiling.timing import DeviceClock, Instant

DATA, COPY, FORWARD, BACKWARD = "waiting for data", "copy", "forward", "backward"
COMMUNICATION, OPTIMIZER, SAVING, REST = "communication", "optimizer", "saving", "logging and the rest"
PHASES = (DATA, COPY, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, SAVING, REST)
"""In the order in which a step goes through them."""

_PHASE_OF = {
    "data loading": DATA,
    "forward": FORWARD,
    "backward": BACKWARD,
    memory.OPTIMIZER: OPTIMIZER,
    EXCHANGE: COMMUNICATION,
    "waiting for rank 0": COMMUNICATION,
    "saving": SAVING,
}
"""What the loop calls a phase -> what it counts as. Anything else is the rest."""

Durations = dict[str, float]
"""Milliseconds by phase."""


class PhaseClock(CurrentPhase):
    """Takes the time whenever the loop enters another phase; what lies between two such borders belongs to the first.

    reported: what the other ranks are told of, which goes on being told. spans: also name the phases in a trace of
    torch.profiler.
    """

    def __init__(self, reported: CurrentPhase, device: torch.device, spans: bool = False) -> None:
        self._reported = reported
        self._clock = DeviceClock(device)
        self._spans = spans
        self._span: Any = None
        self._borders: list[tuple[str, bool, Instant]] = []
        self._step = 0
        super().__init__()

    @property
    def step(self) -> int:
        """The loop sets it where a step begins, when its data are there and agreed on."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = self._reported.step = step
        self.count_as(REST, is_step=True)

    def enter(self, phase: str) -> None:
        super().enter(phase)
        self._reported.enter(phase)
        self.count_as(_PHASE_OF.get(phase, REST))

    def count_as(self, phase: str, is_step: bool = False) -> None:
        """From now on time belongs to this one of PHASES. is_step: a step begins."""
        self._borders.append((phase, is_step, self._clock.now()))
        if self._spans:
            self._close_span()
            self._span = torch.profiler.record_function(phase)
            self._span.__enter__()

    def start(self) -> None:
        """Forgets what was before."""
        self._borders.clear()
        self.count_as(REST)

    def stop(self) -> tuple[Durations, list[Durations]]:
        """What each phase took since `start`, and the same of every step, which adds up to it. Waits for the device.

        A step lasts until the next one begins. Its data are fetched before that, while the step before it is under way;
        the time for which they were waited for counts as its own.
        """
        self.count_as(REST)
        self._close_span()
        steps: list[Durations] = []
        before, loaded = dict.fromkeys(PHASES, 0.0), []
        for (phase, is_step, begin), (_, _, end) in zip(self._borders, self._borders[1:], strict=False):
            if is_step:
                steps.append(dict.fromkeys(PHASES, 0.0) if steps else before)
            duration = self._clock.ms_between(begin, end)
            if phase == DATA:
                loaded.append(duration)
            else:
                (steps[-1] if steps else before)[phase] += duration
        for step, duration in zip(steps, loaded, strict=True):
            step[DATA] = duration
        return {phase: sum(step[phase] for step in steps) for phase in PHASES}, steps

    def _close_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None


@contextmanager
def watched(run: Run, spans: bool = False) -> Iterator[PhaseClock]:
    """Puts a clock where the run's loop says where it is, and a border where the loop does not: around the copy to the
    device, after the optimizer, around what it starts to exchange and what it logs.
    """
    parallel, precision, log = run.parallel, run.precision, run.log
    plain = parallel.phase
    clock = PhaseClock(plain, parallel.device, spans)
    wrapped: list[tuple[Any, str, str, str]] = [
        (parallel, "to_device", COPY, FORWARD),
        (precision, "step", OPTIMIZER, REST),
        (log, "step", REST, REST),
    ]
    if parallel.shard[1] > 1:
        wrapped.append((parallel, "start_sum", COMMUNICATION, REST))
    for owner, name, within, after in wrapped:
        setattr(owner, name, _bordered(getattr(owner, name), clock, within, after))
    parallel.phase = clock
    try:
        yield clock
    finally:
        parallel.phase = plain
        for owner, name, _, _ in wrapped:
            delattr(owner, name)


def _bordered(function: Callable[..., Any], clock: PhaseClock, within: str, after: str) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        clock.count_as(within)
        try:
            return function(*args, **kwargs)
        finally:
            clock.count_as(after)

    return called


@contextmanager
def without_gradient_exchange(run: Run) -> Iterator[None]:
    """Within it every process steps with its own gradients alone, so that what the exchange costs can be told.

    The processes' weights drift apart meanwhile: for measuring only.
    """
    parallel = run.parallel
    own = parallel.gradient_sync
    parallel.gradient_sync = lambda net, enabled: own(net, False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del parallel.gradient_sync
