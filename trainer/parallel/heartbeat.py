"""Heartbeats: what each process of a run is doing, for the others to read when one of them fails or does not come.

They go through the store at which the processes met, which works when their collectives do not.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from trainer.parallel.errors import Failure, exit_at_once
from trainer.parallel.phase import CurrentPhase

TICK_S = 0.5
LONG_PHASE_S = 1.0
"""A phase that lasts so long is worth a heartbeat at once."""
BEAT_EVERY_S = 5.0
ANSWER_WITHIN_S = 3.0
REPORT_WITHIN_S = 18.0
LEAVE_WITHIN_S = 5.0

PING, REPORTER, END_REPORT = "ping", "reporter", "end report"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank was doing. phase, number: see `CurrentPhase`. seconds: for how long then.

    sent: in seconds since 1970. answers_ping: whether it was sent after a `HeartbeatMonitor.ping`.
    """

    phase: str
    number: int
    seconds: float
    sent: float
    answers_ping: bool


@dataclass(frozen=True)
class EndReport:
    """Why the run ends, by the process that was the first to report it.

    rank: its own. status: the exit status of all. message: empty if there is nothing to be said. memory_limit: see
    `Failure`.
    """

    rank: int
    status: int
    message: str
    memory_limit: Mapping[str, Any] | None = None

    @property
    def failure(self) -> Failure:
        """How the other processes end."""
        return Failure(self.message, self.status, self.memory_limit)


class HeartbeatMonitor:
    """One process's part. A thread of its own sends heartbeats about the training thread, and answers pings.

    It also ends the process when the run has failed elsewhere and the training thread does not notice: nobody could
    end a process that somebody started by hand.
    """

    def __init__(self, store: dist.Store, shard: tuple[int, int], phase: CurrentPhase) -> None:
        self._store = store
        self._rank, self._world_size = shard
        self._phase = phase
        self._sent_number, self._sent_at = -1, -math.inf
        self._answers_ping = False
        self._ticks_since_end = 0
        self._closed = threading.Event()
        self.may_force_end = True
        """Whether the training thread may be given up on: not while it does what all wait for, nor when it leaves."""
        self.before_forced_end: Callable[[Failure], None] = lambda failure: None
        """Called when this process is ended because its training thread does not notice."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, so that nothing uses the store any more."""
        self._closed.set()
        self._thread.join(ANSWER_WITHIN_S)

    def report_end(self, compose: Callable[[], EndReport]) -> EndReport | None:
        """The report of the first process that asks for it, which is the one that calls `compose`.

        None if the process that keeps the store is gone, or does not answer.
        """
        reports: list[EndReport] = []

        def agree() -> None:
            with suppress(Exception):
                reports.append(self._agree(compose))

        # A store whose host is stopped never answers, so the wait is not left to it.
        thread = threading.Thread(target=agree, name="report", daemon=True)
        thread.start()
        thread.join(REPORT_WITHIN_S)
        return reports[0] if reports else None

    def ping(self) -> dict[int, Heartbeat]:
        """The last heartbeats by rank, once every rank has answered or had the time to."""
        self._store.set(PING, "now")
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while True:
            ranks = [rank for rank in range(self._world_size) if self._store.check([f"heartbeat {rank}"])]
            beats = {rank: Heartbeat(**json.loads(self._store.get(f"heartbeat {rank}"))) for rank in ranks}
            num_answers = sum(beat.answers_ping for beat in beats.values())
            if num_answers == self._world_size or time.monotonic() > deadline:
                return beats
            time.sleep(0.05)

    def _agree(self, compose: Callable[[], EndReport]) -> EndReport:
        own = str(self._rank)
        if not self._store.check([END_REPORT]) and self._store.compare_set(REPORTER, "", own).decode() == own:
            self._store.set(END_REPORT, json.dumps(asdict(compose())))
        while not self._store.check([END_REPORT]):
            time.sleep(0.05)
        return self._read_report()

    def _read_report(self) -> EndReport:
        return EndReport(**json.loads(self._store.get(END_REPORT)))

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(Exception):  # a store that is gone says nothing, and its process is missed elsewhere
            while not self._closed.wait(TICK_S):
                self._beat()
                self._end_if_overdue()

    def _beat(self) -> None:
        now, phase = time.monotonic(), self._phase
        is_pinged = not self._answers_ping and self._store.check([PING])
        is_due = now - phase.since >= LONG_PHASE_S or now - self._sent_at >= BEAT_EVERY_S
        if is_pinged or (is_due and phase.number != self._sent_number):
            self._answers_ping |= is_pinged
            self._sent_number, self._sent_at = phase.number, now
            beat = Heartbeat(str(phase), phase.number, now - phase.since, time.time(), self._answers_ping)
            self._store.set(f"heartbeat {self._rank}", json.dumps(asdict(beat)))

    def _end_if_overdue(self) -> None:
        is_over = self.may_force_end and self._store.check([END_REPORT])
        self._ticks_since_end = self._ticks_since_end + 1 if is_over else 0
        if self._ticks_since_end * TICK_S > LEAVE_WITHIN_S:
            report = self._read_report()
            with suppress(Exception):
                self.before_forced_end(report.failure)
            exit_at_once(report.status)
