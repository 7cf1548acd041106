"""Ends a process whose interpreter is stuck: nothing in Python could, and it would be waited for until it is killed."""

import faulthandler
import threading
from collections.abc import Callable

LOOK_S = 1.0


class Watchdog:
    """While it is open, this process ends with status 1 when for `limit_s()` seconds no Python of another thread ran.

    That is so in a C function that does not let go of the interpreter, in a regular expression without an end, in a
    system call that does not come back. What each thread was doing is then written to standard error, and also if
    another process ends this one by SIGABRT.
    """

    def __init__(self, limit_s: Callable[[], float]) -> None:
        faulthandler.enable(file=2)
        self._limit_s = limit_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(LOOK_S)

    def _run(self) -> None:
        # A thread in C, which needs no interpreter, counts the seconds since it was started the last time.
        try:
            while True:
                faulthandler.dump_traceback_later(self._limit_s(), exit=True, file=2)
                if self._closed.wait(LOOK_S):
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()
