"""How a run ends that nobody asked to end."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trainer.common.errors import UserError, shown_line
from trainer.common.process import to_stderr

MOST_LINES = 400
"""Lines of a traceback that are shown, with the message of its exception."""
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RESTART = 75
"""Of a run that can go on in new processes: with less memory, or after it lost one; EX_TEMPFAIL of sysexits.h."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""The task's code raised a KeyboardInterrupt, which stops a run as Ctrl-C does."""


class Failure(Exception):
    """The end of a run by a defect, or by another process. The user has read why; the message is for the record.

    status: the exit status. memory_limit: what the next start has to know, as plain values, if that is what ended it.
    lost: where other processes were missed, the ranks that are gone or give no sign of life.
    """

    def __init__(
        self,
        message: str,
        status: int = EXIT_FAILED,
        memory_limit: Mapping[str, Any] | None = None,
        lost: Sequence[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.memory_limit = memory_limit
        self.lost = lost


class RestartNeeded(Exception):
    """This process ran out of memory in a step with others. memory_limit: see `Failure`."""

    def __init__(self, message: str, memory_limit: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.memory_limit = memory_limit


def print_refusal(refusal: UserError) -> None:
    """Writes what the user has to change, a line each."""
    for line in str(refusal).split("\n"):
        print_error(line)


def print_error(message: str, cause: BaseException | None = None) -> None:
    """Writes an error for the user, after the traceback of its cause; in one piece, as several processes may write."""
    trace = "".join(traceback.format_exception(cause)).split("\n")[:-1] if cause is not None else []
    if len(trace) > MOST_LINES:
        trace[MOST_LINES // 2 : -MOST_LINES // 2] = [f"... {len(trace) - MOST_LINES} lines ..."]
    to_stderr("\n".join(map(shown_line, [*trace, f"error: {message}"])))


def exit_at_once(status: int) -> NoReturn:
    """Ends this process though other threads of it may be stuck."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever has become of them
        os._exit(status)
