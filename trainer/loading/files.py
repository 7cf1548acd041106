"""Files: what tells two versions apart, what a damaged one raises, and what makes a written one survive."""

import errno
import os
import tarfile
import zipfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from trainer.loading.errors import BadInput

ARCHIVE_ERRORS = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error)
"""What reading a damaged archive raises. RuntimeError is zipfile's word for an encrypted member."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a file system that has no room, or none for this user or this file."""


@contextmanager
def refusing_disk_errors(what: str, advice: str = "", numbers: Container[int] | None = None) -> Iterator[None]:
    """Makes a BadInput of what the file system says.

    what: the flag with its value, and what fails. numbers: of the errors that are meant; None means all.
    """
    try:
        yield
    except OSError as error:
        if numbers is not None and error.errno not in numbers:
            raise
        raise BadInput(f"{what}: {error.strerror or error}" + (f"; {advice}" if advice else "")) from None


def flush_path(path: Path) -> None:
    """Makes what was written to a file, or renamed in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file as a whole, durably: whatever happens, the old or the new content is there. Raises OSError."""
    with written_as_a_whole(path, path.with_suffix(".tmp")) as file:
        file.write(text)
    flush_path(path.parent)


@contextmanager
def written_as_a_whole(path: Path, temporary: Path, binary: bool = False) -> Iterator[IO[Any]]:
    """A file, by default of text, that takes its place when all of it is on the disk; if that fails, nothing changes.

    temporary: its name until then, in the same folder. Raises OSError.
    """
    try:
        as_text: dict[str, Any] = {} if binary else {"encoding": "utf-8", "newline": ""}
        with temporary.open("wb" if binary else "w", **as_text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def stamp(path: Path) -> tuple[str, int, int]:
    """Changes when the file does: path, size in bytes, time of change in ns."""
    status = os.stat(path)
    return str(path), status.st_size, status.st_mtime_ns
