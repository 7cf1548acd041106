"""Measures each process's time per step, without waits for other processes, and reports slow ranks."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trainer.failure.heartbeat import EXCHANGE
from trainer.loop.progress import Progress
from trainer.loop.watch import Log, StepRecord, Watch
from trainer.parallel.devices import queue_of
from trainer.parallel.group import Group

OWN = ("data loading", "forward", "backward")
"""Activities in which a process does not wait for other processes."""
SENT = (*OWN, EXCHANGE)
REPORT_EVERY = 100
"""Number of optimizer steps in an interval over which times are compared."""
NUM_REPORTS = 5
"""Number of consecutive slow intervals after which a rank is reported, so that brief disturbances are ignored."""
SLOW_FACTOR = 1.3
"""A rank is slow if its time exceeds this multiple of the median over all ranks."""


class RankTimes(Watch):
    """Exchanges the times of all ranks every REPORT_EVERY steps, in the background.

    On the CPU, the training thread is timed. On a GPU, times between CUDA events are read many steps later; time in
    which the GPU waits for data counts as data loading. Evaluations are not timed.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._queue = group, queue_of(group.device)
        self._borders: list[tuple[str, Any]] = []
        self._taken: deque[tuple[int, list[tuple[str, Any]]]] = deque()
        self._pending: Callable[[], Sequence[float]] | None = None
        self._reports: deque[np.ndarray] = deque(maxlen=NUM_REPORTS)
        self._named: set[int] = set()
        self._is_on = False

    def begin(self, progress: Progress) -> None:
        self._is_on = True

    def resume(self) -> None:
        if self._is_on:
            self._group.activity.on_border = self._enter
            self._enter(self._group.activity.name)

    def pause(self) -> None:
        if self._is_on:
            self._enter("")
            self._group.activity.on_border = None

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        if not self._is_on:
            return
        if self._pending is not None:
            times, self._pending = np.reshape(self._pending(), (-1, len(SENT))), None
            for note in self.judge(times):
                log.say_of_ranks(progress.step, note)
        if progress.step % REPORT_EVERY == 0:
            self._taken.append((progress.step, self._borders))
            self._borders = self._borders[-1:]
        if self._taken and self._taken[0][0] + self._queue.lag <= progress.step:
            self._pending = self._group.start_sum(self._seconds(self._taken.popleft()[1]))

    def _enter(self, name: str) -> None:
        self._borders.append((name, self._queue.instant()))

    def _seconds(self, borders: Sequence[tuple[str, Any]]) -> list[float]:
        """Returns a flattened table (ranks, activities): this rank's row contains its seconds, other rows are zero."""
        seconds = defaultdict[str, float](float)
        for (name, begin), (_, end) in pairwise(borders):
            seconds[name] += self._queue.seconds(begin, end)
        table = np.zeros((self._group.world_size, len(SENT)))
        table[self._group.rank] = [seconds[activity] for activity in SENT]
        return table.ravel().tolist()

    def judge(self, times: np.ndarray) -> list[str]:
        """Returns messages about ranks that have become slow. times: seconds in this interval, (ranks, activities)."""
        self._reports.append(times)
        reports = np.stack(self._reports)
        slow = [rank for rank in slow_ranks(reports[..., : len(OWN)], SLOW_FACTOR) if rank not in self._named]
        if len(reports) < NUM_REPORTS or not slow:
            return []
        self._named.update(slow)
        members = self._group.all_gather_object(self._group.describe_own())
        return [self._account(rank, members[rank], reports.mean(0) / REPORT_EVERY) for rank in slow]

    def _account(self, rank: int, member: str, times: np.ndarray) -> str:
        own = times[:, : len(OWN)]
        usual = np.quantile(own, 0.5, axis=0, method="lower")
        activity = int(np.argmax(own[rank] - usual))
        total, usual_total = 1e3 * own[rank].sum(), 1e3 * np.quantile(own.sum(1), 0.5, method="lower")
        return (
            f"Rank {rank} ({member}) is slow: {total:.3g} ms per step without waiting, against a median of "
            f"{usual_total:.3g} ms, over the last {NUM_REPORTS * REPORT_EVERY} steps. Most of the difference is in "
            f"{OWN[activity]}: {1e3 * own[rank, activity]:.3g} ms instead of {1e3 * usual[activity]:.3g} ms. "
            f"The rank that waits longest waits {1e3 * times[:, -1].max():.3g} ms per step."
        )


def slow_ranks(own: np.ndarray, factor: float) -> list[int]:
    """Returns the ranks whose total time exceeds `factor` times the median over ranks in every interval.

    own: seconds without waits for other ranks, (intervals, ranks, activities). For an even number of ranks, the median
    is the smaller of the two middle values, so that the slower of two ranks is found.
    """
    seconds = own.sum(2)
    usual = np.quantile(seconds, 0.5, axis=1, method="lower", keepdims=True)
    return np.flatnonzero((seconds > factor * usual).all(0)).tolist()
