"""Names this process for messages, and prints lines without failing if the terminal has closed."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def own_name() -> str:
    """Returns the id and host of this process, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def boot_of_kernel() -> str:
    """Returns an id that all containers on a machine share until it reboots; the host name if the kernel has no id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def to_stdout(line: str) -> None:
    """Prints a line to standard output and flushes it."""
    with outlived("stdout"):
        print(line, flush=True)


def to_stderr(line: str) -> None:
    """Prints a line to standard error and flushes it."""
    with outlived("stderr"):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def outlived(name: str) -> Iterator[None]:
    """Suppresses an OSError of a standard stream and replaces the stream with /dev/null. name: "stdout" or "stderr"."""
    try:
        yield
    except OSError:
        _to_nowhere(name)


def open_missing() -> None:
    """Opens /dev/null for standard streams that were closed when the process started, as by `>&-` in a shell."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            _to_nowhere(name)


def _to_nowhere(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process exits)
