"""Sends heartbeats with each process's current activity, so that other processes can explain a failure or a delay.

Heartbeats use the rendezvous store, which works even when collectives do not.
"""

import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass

import torch.distributed as dist

from trainer.common.process import boot_of_kernel, within
from trainer.failure.errors import Failure, exit_at_once

EXCHANGE = "the exchange with the other ranks"

TICK_S = 0.5
TICKS_PER_BEAT = 10
BEAT_S = TICK_S * TICKS_PER_BEAT
ANSWER_WITHIN_S = 3.0
REPORT_WITHIN_S = 18.0
LEAVE_WITHIN_S = 5.0

PING, NUM_REPORTERS, END_REPORT = "ping", "number of reporters", "end report"
ABORTS_WITHIN_S = 0.5


class CurrentActivity:
    """Current activity of the training thread, which the heartbeat thread reads.

    step: current optimizer step, from 1; 0 before the first step. name: for example "forward". since: start of the
    activity, by time.monotonic(). number: activities entered so far; all ranks enter the same sequence of activities,
    so a rank with the lowest number is late.
    """

    def __init__(self) -> None:
        self.step = 0
        self.name = "start-up"
        self.since = time.monotonic()
        self.number = 0
        self.on_border: Callable[[str], None] | None = None
        """Called with the name of each new activity, and with EXCHANGE when a backward pass waits for other ranks."""

    def enter(self, name: str) -> None:
        self.name = name
        self.since = time.monotonic()
        self.number += 1
        if self.on_border is not None:
            self.on_border(name)

    def wait_for_others(self) -> None:
        """Notes that the backward pass now waits for other ranks: calls `on_border` with EXCHANGE."""
        if self.on_border is not None:
            self.on_border(EXCHANGE)

    def __str__(self) -> str:
        return f"{self.name} at optimizer step {self.step}" if self.step else self.name


@dataclass(frozen=True)
class Heartbeat:
    """Message with a rank's current activity.

    activity, number: text and number of `CurrentActivity`. seconds: time since the activity began. sent: Unix time in
    seconds. answers_ping: whether the message was sent after a `HeartbeatMonitor.ping`.
    """

    activity: str
    number: int
    seconds: float
    sent: float
    answers_ping: bool


class HeartbeatMonitor:
    """Thread that sends heartbeats with the training thread's activity, and answers pings.

    Ends the process if the run has failed in another process and the training thread does not notice.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, activity: CurrentActivity, neighbours: "Neighbours"
    ) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._activity = activity
        self._neighbours = neighbours
        self._closed = threading.Event()
        self.may_force_end = True
        """Whether the monitor may end this process; False during exit, and during work that all ranks wait for."""
        self.before_forced_end: Callable[[Failure], None] = lambda failure: None
        """Called before the monitor ends this process because the training thread has not noticed a failure."""
        self.on_beat: Callable[[float], None] = lambda silent_s: None
        """Called at each heartbeat with the seconds since the last heartbeat of the next rank."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called if a process on this machine exited and no rank reports it, for example because all wait for a GPU."""
        self._send_heartbeat(is_pinged=False)  # at once, so that other ranks also notice an early exit
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(ANSWER_WITHIN_S)

    def report_end(self, compose: Callable[[], Failure]) -> tuple[Failure, bool] | None:
        """Agrees with all ranks on a report of why the run ends; returns the report, and whether this process built it.

        compose: called to build the report if no other rank has reported. Returns None if the store does not respond.
        """
        with suppress(Exception):
            # a store whose host process is suspended never responds, so the wait needs a limit
            return within(REPORT_WITHIN_S, lambda: self._agree(compose))
        return None

    def ping(self) -> dict[int, Heartbeat]:
        """Asks all ranks for a heartbeat, waits up to ANSWER_WITHIN_S, and returns each rank's last heartbeat."""
        self._store.set(PING, "now")
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while True:
            ranks = [rank for rank in range(self._world_size) if self._store.check([f"heartbeat {rank}"])]
            beats = {rank: Heartbeat(*json.loads(self._store.get(f"heartbeat {rank}"))) for rank in ranks}
            awaited = [rank for rank in range(self._world_size) if rank not in beats or not beats[rank].answers_ping]
            if all(map(self._neighbours.is_gone, awaited)) or time.monotonic() > deadline:
                return beats
            time.sleep(0.05)

    def _agree(self, compose: Callable[[], Failure]) -> tuple[Failure, bool]:
        is_first = self._store.add(NUM_REPORTERS, 1) == 1
        if is_first:
            failure = compose()
            report = [str(failure), failure.status, failure.memory_limit, failure.lost]
            self._store.set(END_REPORT, json.dumps(report))
        while not self._store.check([END_REPORT]):
            time.sleep(0.05)
        return self._reported(), is_first

    def _reported(self) -> Failure:
        return Failure(*json.loads(self._store.get(END_REPORT)))

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ticks_since_end = ticks_since_loss = silent_beats = 0
        seen = b""
        with suppress(Exception):  # an error means that the store is lost, which other code reports
            for tick in itertools.count():
                if self._closed.wait(TICK_S):
                    self._store.set(f"closed {self._rank}", "")
                    return
                is_pinged = self._store.check([PING])
                if is_pinged or tick % TICKS_PER_BEAT == 0:
                    self._send_heartbeat(is_pinged)
                if tick % TICKS_PER_BEAT == 0:
                    before, seen = seen, self._heartbeat_of_next()
                    silent_beats = silent_beats + 1 if seen == before else 0
                    self.on_beat(silent_beats * BEAT_S)
                has_ended = self._store.check([END_REPORT])
                ticks_since_loss = ticks_since_loss + 1 if not has_ended and self._misses_a_neighbour() else 0
                if ticks_since_loss * TICK_S > LEAVE_WITHIN_S:
                    self.on_loss()
                ticks_since_end = ticks_since_end + 1 if has_ended and self.may_force_end else 0
                if ticks_since_end * TICK_S > LEAVE_WITHIN_S:
                    failure = self._reported()
                    with suppress(Exception):
                        self.before_forced_end(failure)
                    exit_at_once(failure.status)

    def _misses_a_neighbour(self) -> bool:
        gone = filter(self._neighbours.is_gone, range(self._world_size))
        return any(not self._store.check([f"closed {rank}"]) for rank in gone)

    def _heartbeat_of_next(self) -> bytes:
        """Returns the next rank's last heartbeat, or a new value on each call if that rank sent none or has ended."""
        rank = (self._rank + 1) % self._world_size
        is_there = self._store.check([f"heartbeat {rank}"]) and not self._store.check([f"closed {rank}"])
        return self._store.get(f"heartbeat {rank}") if is_there else str(time.monotonic()).encode()

    def _send_heartbeat(self, is_pinged: bool) -> None:
        activity = self._activity
        beat = Heartbeat(str(activity), activity.number, time.monotonic() - activity.since, time.time(), is_pinged)
        self._store.set(f"heartbeat {self._rank}", json.dumps(astuple(beat)))


# --- processes of this machine -----------------------------------------------------------------------------------


def process_space() -> str:
    """Returns an identifier of the scope in which process ids are unique: kernel boot and pid namespace."""
    try:
        return f"{boot_of_kernel()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


class Neighbours:
    """Handles (pidfds) of processes on this machine, by rank; unlike process ids, they are never reused.

    processes: maps ranks to process ids in this `process_space`. Except on Linux, every process is unknown.
    """

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._descriptors: dict[int, int] = {}
        for rank, process in processes.items():
            with suppress(OSError, AttributeError):
                self._descriptors[rank] = os.pidfd_open(process)

    def is_gone(self, rank: int) -> bool:
        """Returns whether the rank's process is known to have exited, and so to have released its locks."""
        return self.await_end(rank, 0.0)

    def await_end(self, rank: int, timeout_s: float) -> bool:
        """Waits for a rank's process to exit; returns False for an unknown process, and after `timeout_s` seconds."""
        if rank not in self._descriptors:
            return False
        poll = select.poll()
        poll.register(self._descriptors[rank], select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def end(self, rank: int) -> None:
        """Kills a rank's process if it still runs; does nothing for an unknown process.

        Sends SIGABRT, on which a hanging process prints its stack, then SIGKILL, which also ends a suspended process.
        """
        for number in (signal.SIGABRT, signal.SIGKILL):
            if rank in self._descriptors and not self.is_gone(rank):
                with suppress(OSError):
                    signal.pidfd_send_signal(self._descriptors[rank], number)
                self.await_end(rank, ABORTS_WITHIN_S)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
