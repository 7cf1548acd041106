"""How long each process takes for a step, apart from waiting for the others; one that is slow is named."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from trainer.loop.step_results import GROUP_SIZE
from trainer.parallel.activity import EXCHANGE, ignore_border
from trainer.parallel.base import Parallel

OWN = ("data loading", "forward", "backward")
"""Activities in which nobody waits for another process."""
SENT = (*OWN, EXCHANGE)
REPORT_EVERY = 100
"""Optimizer steps."""
NUM_REPORTS = 5
"""In a row that a process must be slow: what else runs on its machine for a moment shall not count."""
SLOW_FACTOR = 1.3
"""A process is slow whose own part of a step takes this many times the median of all processes."""


class RankTimes:
    """Tells every process the times of all, every REPORT_EVERY steps.

    The times go along with the numbers that a step exchanges anyway. They are those of the training thread on the CPU,
    and on a GPU those between events on its stream, looked at when they have long since come to pass: the time that it
    is without work for want of data counts as data loading. Evaluations between the steps do not count. All processes
    call the methods at the same step.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._clock: HostClock | DeviceClock | None = None
        self._taken: deque[int] = deque()
        self._reports: deque[np.ndarray] = deque(maxlen=NUM_REPORTS)
        self._named: set[int] = set()

    def begin(self) -> None:
        """Before the first step of this process."""
        if self._parallel.world_size > 1:
            device = self._parallel.device
            self._clock = HostClock() if device.type == "cpu" else DeviceClock(device)

    def resume(self) -> None:
        """Before the first step, and the first one after `pause`."""
        if self._clock is not None:
            self._parallel.activity.on_border = self._clock.enter
            self._clock.enter(self._parallel.activity.name)

    def pause(self) -> None:
        """No step follows for now."""
        if self._clock is not None:
            self._clock.enter("")
            self._parallel.activity.on_border = ignore_border

    def after_step(self, step: int) -> None:
        """step: optimizer steps done."""
        if self._clock is not None and step % REPORT_EVERY == 0:
            self._clock.stop()
            self._taken.append(step)

    def numbers_to_add(self, step: int) -> tuple[float, ...]:
        """What goes along with the exchange that starts after so many steps; see `compare`.

        Seconds in the activities of SENT, in a place of this process's own among zeros.
        """
        if self._clock is None or not self._taken or self._taken[0] + self._clock.delay > step:
            return ()
        self._taken.popleft()
        seconds, rank, world_size = self._clock.read(), self._parallel.rank, self._parallel.world_size
        own = [seconds.get(activity, 0.0) for activity in SENT]
        return (*[0.0] * rank * len(SENT), *own, *[0.0] * (world_size - 1 - rank) * len(SENT))

    def compare(self, sums: Sequence[float]) -> list[str]:
        """sums: over all processes, of what `numbers_to_add` gave. Returns a line for each one that turns out slow."""
        if not sums:
            return []
        self._reports.append(np.reshape(sums, (-1, len(SENT))))
        reports = np.stack(self._reports)
        slow = [rank for rank in slow_ranks(reports[..., : len(OWN)], SLOW_FACTOR) if rank not in self._named]
        if len(reports) < NUM_REPORTS or not slow:
            return []
        self._named.update(slow)
        members = self._parallel.gather(self._parallel.describe_own())
        return [self._account(rank, members[rank], reports.mean(0) / REPORT_EVERY) for rank in slow]

    def _account(self, rank: int, member: str, times: np.ndarray) -> str:
        """times: (processes, SENT) seconds of a step."""
        own = times[:, : len(OWN)]
        usual = np.quantile(own, 0.5, axis=0, method="lower")
        activity = int(np.argmax(own[rank] - usual))
        total, usual_total = 1e3 * own[rank].sum(), 1e3 * np.quantile(own.sum(1), 0.5, method="lower")
        return (
            f"Rank {rank} ({member}) is slow: a step takes it {total:.3g} ms apart from waiting, where the median is "
            f"{usual_total:.3g} ms, over the last {NUM_REPORTS * REPORT_EVERY} steps. Most of it in "
            f"{OWN[activity]}: {1e3 * own[rank, activity]:.3g} ms instead of "
            f"{1e3 * usual[activity]:.3g}. The rank that waits longest waits {1e3 * times[:, -1].max():.3g} ms a step."
        )


class HostClock:
    """Seconds of the training thread in each activity."""

    delay = 0
    """Steps from `stop` to the moment at which `read` makes nobody wait."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stopped: deque[Mapping[str, float]] = deque()
        self._name, self._since = "", time.perf_counter()

    def enter(self, name: str) -> None:
        """Where an activity begins."""
        now = time.perf_counter()
        self._seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def stop(self) -> None:
        """Ends a period, and begins the next one."""
        self._stopped.append(self._seconds)
        self._seconds = defaultdict(float)

    def read(self) -> Mapping[str, float]:
        """Of the first period that was not read yet."""
        return self._stopped.popleft()


class DeviceClock:
    """The same of a GPU's stream."""

    delay = GROUP_SIZE

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._borders: list[tuple[str, torch.cuda.Event]] = []
        self._stopped: deque[list[tuple[str, torch.cuda.Event]]] = deque()

    def enter(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._borders.append((name, event))

    def stop(self) -> None:
        self._stopped.append(self._borders)
        self._borders = self._borders[-1:]

    def read(self) -> Mapping[str, float]:
        borders, seconds = self._stopped.popleft(), defaultdict[str, float](float)
        borders[-1][1].synchronize()
        for (name, begin), (_, end) in pairwise(borders):
            seconds[name] += begin.elapsed_time(end) / 1e3
        return seconds


def slow_ranks(own: np.ndarray, factor: float) -> list[int]:
    """Those that take more than so many times the median in every report, all activities together.

    own: (reports, processes, activities) seconds. Of an even number of processes the median is the faster of the middle
    two, so that of two the slow one can be told.
    """
    seconds = own.sum(2)
    usual = np.quantile(seconds, 0.5, axis=1, method="lower", keepdims=True)
    return np.flatnonzero((seconds > factor * usual).all(0)).tolist()
