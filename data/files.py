"""Files: what tells two versions apart, what a damaged one raises, and what makes a written one survive."""

import os
import zipfile
import zlib
from pathlib import Path

ARCHIVE_ERRORS = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What reading a damaged archive raises. RuntimeError is zipfile's word for an encrypted member."""


def flush_folder(path: Path) -> None:
    """Makes what was renamed in a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stamp(path: Path) -> tuple[str, int, int]:
    """Changes when the file does: path, size in bytes, time of change in ns."""
    status = os.stat(path)
    return str(path), status.st_size, status.st_mtime_ns
