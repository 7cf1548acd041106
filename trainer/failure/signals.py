"""Requests to stop: a signal only sets a flag, which travels with the next step's exchange to all ranks."""

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
"""A torchrun agent looks for new nodes every `--monitor-interval`, 0.1 s unless told, and then asks its processes."""
ONE_CTRL_C_S = 0.5
"""A terminal and a launcher may both send one Ctrl-C, which then comes twice within less."""


class LeftAtOnce(SystemExit):
    """A signal that ends the process without a save, such as the second Ctrl-C. The user knows why it ends."""


def leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Handles a signal so."""
    raise LeftAtOnce(128 + number)


class StopRequest:
    """The handler of the stop signals. A second Ctrl-C leaves at once.

    pass_on: called with each signal that comes.
    """

    def __init__(self, pass_on: Callable[[int], None] | None = None) -> None:
        self.signal_number: int | None = None
        self._pass_on = pass_on
        self._previous: dict[int, Any] = {}
        self._asked_at = -math.inf

    def install(self) -> None:
        """A signal that is ignored, as nohup does with SIGHUP, stays ignored.

        Only the main thread of a process can handle signals; on another one this does nothing.
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
        """Waits until this process has been asked itself, and not only another one of its group; or for that long."""
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
    """Around what installs a `StopRequest` for as long as its process runs, in a process that goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_quickly() -> None:
    """For a process that will end: spares it looks at every object that is imported, and the last one, up to 1 s."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)
