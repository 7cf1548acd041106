"""Exit statuses and exceptions of failed runs, and functions that print errors."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trainer.common.errors import UserError, shown_line
from trainer.common.process import to_stderr

MOST_LINES = 400
"""Largest number of lines of a printed traceback."""
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RESTART = 75
"""Exit status (EX_TEMPFAIL) of a run that new processes can resume after an out-of-memory error or a lost rank."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, or if the task's code raised KeyboardInterrupt."""


class Failure(Exception):
    """Raised to end a run after an error in this or another process. The message has already been printed.

    status: the exit status. memory_limit: after an out-of-memory error, the new limit on samples per forward pass.
    lost: ranks that exited or do not respond; None if the failure began in this process.
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
    """Raised after an out-of-memory error in a multi-process run. memory_limit: as in `Failure`."""

    def __init__(self, message: str, memory_limit: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.memory_limit = memory_limit


def print_refusal(refusal: UserError) -> None:
    """Prints the errors of a UserError, one per line."""
    for line in str(refusal).split("\n"):
        print_error(line)


def print_error(message: str, cause: BaseException | None = None) -> None:
    """Prints the traceback of `cause` and an error in a single write, since several processes may print."""
    trace = "".join(traceback.format_exception(cause)).split("\n")[:-1] if cause is not None else []
    if len(trace) > MOST_LINES:
        trace[MOST_LINES // 2 : -MOST_LINES // 2] = [f"... {len(trace) - MOST_LINES} lines ..."]
    to_stderr("\n".join(map(shown_line, [*trace, f"error: {message}"])))


def exit_at_once(status: int) -> NoReturn:
    """Exits this process even if other threads hang."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also if a flush raises
        os._exit(status)
