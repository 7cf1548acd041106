"""This process: its name for messages, and console output that survives a closed terminal."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def own_name() -> str:
    """Returns the process id and host, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def boot_of_kernel() -> str:
    """Returns an id shared by all containers on a machine until it reboots; the host name where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def to_stdout(line: str) -> None:
    """Prints a line and flushes it."""
    with outlived("stdout"):
        print(line, flush=True)


def to_stderr(line: str) -> None:
    """Prints a line to stderr and flushes it."""
    with outlived("stderr"):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def outlived(name: str) -> Iterator[None]:
    """Swallows OSErrors of sys.stdout or sys.stderr (`name`), which is replaced by /dev/null after the first."""
    try:
        yield
    except OSError:
        _to_nowhere(name)


def open_missing() -> None:
    """Replaces streams closed before start, as by `>&-`; otherwise the next file opened would take their number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            _to_nowhere(name)


def _to_nowhere(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process exits)
