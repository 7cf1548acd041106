"""This process: its name among the processes of all machines, and its console, which it outlives where that is gone."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def own_name() -> str:
    """The id and the host of this process, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def boot_of_kernel() -> str:
    """An id that all containers of a machine share until it starts again; the name of the host where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def to_stdout(line: str) -> None:
    """Prints a line, and flushes it."""
    with outlived("stdout"):
        print(line, flush=True)


def to_stderr(line: str) -> None:
    """Prints a line to standard error, and flushes it."""
    with outlived("stderr"):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def outlived(name: str) -> Iterator[None]:
    """Writing within to sys.stdout or sys.stderr, of which this is the name, raises no OSError.

    The first one is the last: what is written later goes nowhere, and is not tried again when Python ends.
    """
    try:
        yield
    except OSError:
        _to_nowhere(name)


def open_missing() -> None:
    """Opens streams that the process was started without, as by `>&-`; else the next file opened would be one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            _to_nowhere(name)


def _to_nowhere(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (it lasts as long as the process)
