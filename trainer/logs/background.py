"""Runs the user's loggers in threads, so that they can neither slow down nor end a run."""

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
"""Largest number of calls in a logger's queue; a run makes this many calls in a few minutes."""
END_WITHIN_S = 15.0
"""Seconds that loggers get to end: half of the 30 s that schedulers usually grant after SIGTERM; saving takes time."""
SILENT_WAIT_S = 1.0
THREAD_NAME = "logger of the user's own"


def build_loggers(values: Sequence[str]) -> list["BackgroundLogger"]:
    """Creates the loggers of `--logger`. Raises UserError if a logger cannot be imported or created."""
    loggers = []
    for value in values:
        logger_type = SERVICES.get(value) or find_class(value, "--logger", Logger, comes_first=False)
        try:
            loggers.append(BackgroundLogger(logger_type(), f"--logger {value}"))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"--logger {value}: cannot be created: {_in_one_line(error)}") from None
    return loggers


class BackgroundLogger(Logger):
    """Logger that forwards calls to another logger in a thread, without waiting for the calls to return.

    A full queue drops its oldest call. After the logger's first exception no call is forwarded, since the logger's
    state is unknown.

    name: the logger's name in messages.
    """

    def __init__(self, logger: Logger, name: str) -> None:
        self.name, self._logger = name, logger
        self._waiting: deque[tuple[str, tuple[object, ...]]] = deque()
        self._changed = threading.Condition()
        """Guards the attributes that both threads use: queued calls, and the state at the end."""
        self._num_dropped = 0
        self._end_state: str | None = None
        self._has_failed = self._is_abandoned = False
        self._notes: deque[str] = deque()

    def take_notes(self) -> list[str]:
        """Returns new notes for the user; the training thread prints them."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def start(self, run: LoggedRun) -> None:
        # a daemon, so that the interpreter does not wait for it at exit
        self._thread = threading.Thread(target=self._work, args=(run,), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        self._put("say", line)

    def metrics(self, record: Record) -> None:
        # copied, here and below, since the task may change the content before the thread reads it
        self._put("metrics", replace(record, values=dict(record.values)))

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        self._put("pictures", step, {name: picture.copy() for name, picture in pictures.items()})

    def ask_to_end(self, state: str) -> None:
        """Queues the logger's `end` after all other calls, without waiting for it."""
        with self._changed:
            self._end_state = state
            self._changed.notify()

    def await_end(self, deadline: float) -> bool:
        """Waits until `deadline` (time.monotonic()) for the thread to end; returns whether it has ended."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Abandons the thread if it is still running, and adds notes about calls that were not forwarded."""
        with self._changed:
            num_missed = len(self._waiting)
            self._waiting.clear()
            if self._thread.is_alive():
                self._is_abandoned = True
                self._note(f"did not finish in time and is abandoned; missed calls: {num_missed}")
            if self._num_dropped:
                self._note(f"fell behind; dropped calls: {self._num_dropped}")

    def _put(self, method: str, *arguments: object) -> None:
        with self._changed:
            if self._has_failed:
                return
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
                if self._num_dropped == 1:
                    self._note(f"falls behind: {MAX_WAITING} calls are queued, so the oldest are dropped")
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
        except BaseException as error:  # a logger must not end a run
            with self._changed:
                self._has_failed = True
                self._waiting.clear()
            self._note(f"{method}() failed: {_in_one_line(error)}; the run continues without it")

    def _next(self) -> tuple[str, tuple[object, ...]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._end_state is not None)
            return self._waiting.popleft() if self._waiting else ("end", (self._end_state,))


def end_all(loggers: Sequence[BackgroundLogger], state: str, say: Callable[[str], None]) -> None:
    """Ends all loggers within END_WITHIN_S in total. state: the run's state, for `Logger.end`."""
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
    """Returns whether an abandoned logger's thread is still running and may block the interpreter's exit."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
