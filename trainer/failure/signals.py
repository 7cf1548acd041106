"""Handles stop signals: a signal sets a flag, which the next step's collective sends to all ranks."""

import atexit
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

AGENT_ASKS_WITHIN_S = 10.0
"""Seconds to wait for a torchrun agent to notice new nodes and signal its processes."""
ONE_CTRL_C_S = 0.5
"""Seconds within which a second SIGINT counts as the same Ctrl-C, since terminal and launcher may both send one."""


class LeftAtOnce(SystemExit):
    """Raised to exit after a signal without saving, for example after a second Ctrl-C."""


def leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler that exits without saving."""
    raise LeftAtOnce(128 + number)


class StopRequest:
    """Handler of the stop signals; it is true after the first signal. A second Ctrl-C exits without saving.

    pass_on: called with each signal's number.
    """

    def __init__(self, pass_on: Callable[[int], None] | None = None) -> None:
        self.signal_number: int | None = None
        self._pass_on = pass_on
        self._previous: dict[int, Any] = {}
        self._asked_at = -math.inf

    def install(self) -> None:
        """Installs the handler, except for signals that are ignored, such as SIGHUP under nohup.

        Does nothing outside the main thread, since Python allows signal handlers only there.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_status(self) -> int:
        return 128 + self.signal_number if self.signal_number is not None else 0

    def await_own(self) -> None:
        """Waits until this process receives a signal, for at most AGENT_ASKS_WITHIN_S seconds."""
        deadline = time.monotonic() + AGENT_ASKS_WITHIN_S
        while not self and time.monotonic() < deadline:
            time.sleep(0.05)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pass_on is not None:
            self._pass_on(number)
        if self.signal_number is None:
            self._asked_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > ONE_CTRL_C_S:
            leave_at_once(number, frame)
        self.signal_number = number


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Context that restores the handlers of the stop signals on exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_until_exit() -> None:
    """Ignores stop signals but Ctrl-C, since the interpreter resets handlers while it exits, and a signal would kill.

    A launcher would take a killed process for a failure, although its run is saved. Schedulers may signal twice.
    """
    if threading.current_thread() is threading.main_thread():
        for number in set(STOP_SIGNALS) - {signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)


def exit_quickly() -> None:
    """Speeds up this process's exit by up to 1 s: garbage collection at exit skips all objects."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)
