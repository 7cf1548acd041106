"""A logger of a user's own, off the critical path: it can neither slow a run nor end it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainer.common.errors import UserError
from trainer.common.validation import find_class
from trainer.logs.logger import LoggedRun, Logger, Record
from trainer.logs.services import SERVICES
from trainer.task import Picture

MAX_WAITING = 500
"""Calls that wait for a logger, at the usual pace of a run the calls of minutes."""
END_WITHIN_S = 15.0
"""Half of the 30 s that schedulers leave a process that they ask to stop; the other half is for saving."""
SILENT_WAIT_S = 1.0
THREAD_NAME = "logger of the user's own"


def build_loggers(values: Sequence[str]) -> list["BackgroundLogger"]:
    """The loggers that `--logger` names. Raises UserError for one that cannot be imported or made."""
    loggers = []
    for value in values:
        logger_type = SERVICES.get(value) or find_class(value, "--logger", Logger, comes_first=False)
        try:
            loggers.append(BackgroundLogger(logger_type(), f"--logger {value}"))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"--logger {value}: cannot be made: {_in_one_line(error)}") from None
    return loggers


class BackgroundLogger(Logger):
    """Hands every call to a thread of its own, in which the logger works them off, and returns at once.

    When MAX_WAITING calls wait, the oldest makes room for the next one. The first exception ends the logging: whether a
    logger can go on after one of its calls, nobody knows.

    logger: of the user. name: what to call it in a message.
    """

    def __init__(self, logger: Logger, name: str) -> None:
        self.name, self._logger = name, logger
        self._waiting: deque[tuple[str, tuple[object, ...]]] = deque()
        self._changed = threading.Condition()
        """Guards what both threads use: the calls, and how the logging ends."""
        self._num_dropped = 0
        self._end_state: str | None = None
        self._has_failed = self._is_abandoned = False
        self._notes: deque[str] = deque()

    def take_notes(self) -> list[str]:
        """What the user is to be told since the last call; the training thread says it."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def start(self, run: LoggedRun) -> None:
        # A daemon, so that no interpreter waits for it.
        self._thread = threading.Thread(target=self._work, args=(run,), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        self._put("say", line)

    def metrics(self, record: Record) -> None:
        # Copies here and below: the thread reads them later, and the user's code may change them.
        self._put("metrics", replace(record, values=dict(record.values)))

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        self._put("pictures", step, {name: picture.copy() for name, picture in pictures.items()})

    def ask_to_end(self, state: str) -> None:
        """Has the logger's `end` called once nothing waits any more, and returns at once."""
        with self._changed:
            self._end_state = state
            self._changed.notify()

    def await_end(self, deadline: float) -> bool:
        """Waits for that until the deadline, in seconds of time.monotonic(); returns whether it has come."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Leaves the thread behind if it is still at work, and notes what was not logged."""
        with self._changed:
            num_missed = len(self._waiting)
            self._waiting.clear()
            if self._thread.is_alive():
                self._is_abandoned = True
                self._note(f"is still not done and is left behind; calls that it missed: {num_missed}")
            if self._num_dropped:
                self._note(f"calls that were dropped because it fell behind: {self._num_dropped}")

    def _put(self, method: str, *arguments: object) -> None:
        with self._changed:
            if self._has_failed:
                return
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
                if self._num_dropped == 1:
                    self._note(f"falls behind: {MAX_WAITING} calls wait for it, so the oldest are dropped")
            self._waiting.append((method, arguments))
            self._changed.notify()

    def _note(self, text: str) -> None:
        self._notes.append(f"{self.name}: {text}")

    # --- in the thread ---------------------------------------------------------------------------------------

    def _work(self, run: LoggedRun) -> None:
        method: str = "start"
        arguments: tuple[object, ...] = (run,)
        try:
            while True:
                getattr(self._logger, method)(*arguments)
                if method == "end" or self._is_abandoned:
                    return
                method, arguments = self._next()
        except BaseException as error:  # whatever it is, it is no reason to end a run
            with self._changed:
                self._has_failed = True
                self._waiting.clear()
            self._note(f"{method}() failed: {_in_one_line(error)}; the run goes on without it")

    def _next(self) -> tuple[str, tuple[object, ...]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._end_state is not None)
            return self._waiting.popleft() if self._waiting else ("end", (self._end_state,))


def end_all(loggers: Sequence[BackgroundLogger], state: str, say: Callable[[str], None]) -> None:
    """Ends them, within END_WITHIN_S all together. state: see `Logger.end`. say: tells the user a line."""
    now = time.monotonic()
    for logger in loggers:
        logger.ask_to_end(state)
    at_work = [logger.name for logger in loggers if not logger.await_end(now + SILENT_WAIT_S)]
    if at_work:
        say(f"Waiting for {', '.join(at_work)}, at most {END_WITHIN_S - SILENT_WAIT_S:g} s.")
    for logger in loggers:
        logger.await_end(now + END_WITHIN_S)
        logger.leave()


def some_are_left() -> bool:
    """Whether a logger of this process was left behind, which may hold the interpreter when it ends."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
