"""Lines on standard output and standard error, which a run outlives: a pipe or terminal that is gone stops nothing."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def to_stdout(line: str) -> None:
    """Written at once."""
    with outlived("stdout"):
        print(line, flush=True)


def to_stderr(line: str) -> None:
    """Written at once."""
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
    """Opens what the process was started without, as by `>&-`; else the next file that is opened would be that."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            _to_nowhere(name)


def _to_nowhere(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (it lasts as long as the process)
