"""Exit statuses and exceptions of runs that fail, and how they are printed."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trainer.common.errors import UserError, shown_line
from trainer.common.process import to_stderr

MOST_LINES = 400
"""Longest printed traceback, in lines."""
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RESTART = 75
"""Exit status of a run that can resume in new processes, after a memory error or a lost rank (EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit status when the task's code raised KeyboardInterrupt; the same as after Ctrl-C."""


class Failure(Exception):
    """The end of a run by a defect, or because another process failed. The message has been printed already.

    status: the exit status. memory_limit: plain values for the next start, after an out-of-memory error. lost: ranks
    that exited or do not respond, if other processes were missed.
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
    """An out-of-memory error in a step shared with other processes. memory_limit: see `Failure`."""

    def __init__(self, message: str, memory_limit: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.memory_limit = memory_limit


def print_refusal(refusal: UserError) -> None:
    """Prints what the user has to change, one error per line."""
    for line in str(refusal).split("\n"):
        print_error(line)


def print_error(message: str, cause: BaseException | None = None) -> None:
    """Prints an error after its cause's traceback, in one write, since several processes may print."""
    trace = "".join(traceback.format_exception(cause)).split("\n")[:-1] if cause is not None else []
    if len(trace) > MOST_LINES:
        trace[MOST_LINES // 2 : -MOST_LINES // 2] = [f"... {len(trace) - MOST_LINES} lines ..."]
    to_stderr("\n".join(map(shown_line, [*trace, f"error: {message}"])))


def exit_at_once(status: int) -> NoReturn:
    """Exits this process even if other threads hang."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever flushing raised
        os._exit(status)
