"""Requests to stop: a signal only sets a flag, which travels with the next step's exchange to all ranks."""

import atexit
import gc
import signal
import sys
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

AGENT_ASKS_WITHIN_S = 10.0
"""A torchrun agent looks for new nodes every `--monitor-interval`, 0.1 s unless told, and then asks its processes."""


class StopRequest:
    """Installed as the handler of SIGTERM, SIGINT, SIGUSR1 and SIGHUP. A second Ctrl-C leaves at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def install(self) -> None:
        """A signal that is ignored, as nohup does with SIGHUP, stays ignored."""
        for name in (*STOP_SIGNALS, signal.SIGHUP):
            if signal.getsignal(name) is not signal.SIG_IGN:
                signal.signal(name, self._on_signal)

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def await_own(self, timeout_s: float = AGENT_ASKS_WITHIN_S) -> None:
        """Waits until this process has been asked itself, and not only another one of its group; or for that long."""
        deadline = time.monotonic() + timeout_s
        while not self and time.monotonic() < deadline:
            time.sleep(0.05)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            sys.exit(128 + number)
        self.signal_number = number


def exit_quickly() -> None:
    """For a process that will end: spares the interpreter its last look at every object, up to a second of CPU time."""
    atexit.register(gc.freeze)
