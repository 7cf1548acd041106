"""Names this process for messages, prints lines even if the terminal has closed, and limits the time of calls."""

import io
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def own_name() -> str:
    """Returns the id and host of this process, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def command_of_main() -> str:
    """Returns the command that starts main.py, with the program's path if it is not in the current folder."""
    program, here = Path(__file__).resolve().parents[2] / "main.py", Path("main.py")
    is_elsewhere = program.is_file() and not (here.is_file() and here.samefile(program))
    return f"python {shlex.quote(str(program))}" if is_elsewhere else "python main.py"


def boot_of_kernel() -> str:
    """Returns an id that all containers on a machine share until it reboots, or the host name if there is no id."""
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
def outlived(name: str, kind: type[OSError] = OSError) -> Iterator[None]:
    """Suppresses a standard stream's error and replaces the stream with /dev/null. name: "stdout" or "stderr"."""
    try:
        yield
    except kind:
        _to_nowhere(name)


def prepare_streams() -> None:
    """Opens /dev/null for closed standard streams, and escapes characters that standard output's encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # after `>&-` in a shell
            _to_nowhere(name)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _to_nowhere(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process exits)


def within(limit_s: float, function: Callable[[], T]) -> T | None:
    """Returns the result of a function, or None if the function does not return within `limit_s` seconds.

    Runs the function in a daemon thread, because calls of PyTorch or of a driver may never return; the thread is not
    stopped. Raises the function's exception.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # re-raised in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=call, name="within", daemon=True)
    thread.start()
    thread.join(limit_s)
    for error in errors:
        raise error
    return results[0] if results else None
