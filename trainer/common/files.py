"""Files: read within bounds, written as a whole; and plain values as JSON holds them, without NaN."""

import errno
import io
import math
import os
import stat as stat_of
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from trainer.common.errors import DiskError, UserError, shortened

T = TypeVar("T")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a file system that has no room, or none for this user or this file."""

READ_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)
"""Error numbers of a disk or a file system of the network that may well give the file at the next attempt."""
NO_FILE = (errno.EISDIR, errno.EINVAL, errno.EFBIG)
"""Error numbers of `read_whole` for what is there, and is no file of the kind that is read."""
READ_AGAIN_AFTER_S = (0.1, 1.0)
"""The waits before a file is read a second and a third time."""

FOLDER_GONE = "the folder is gone, and what was in it"

MOST_LINE = 1 << 20
"""Characters of a line of text that is read; a longer one is none that a person or a program has meant as such."""
MOST_RECORD = 64 << 20
"""Bytes of a small file: of settings, of the record of a run, of an alphabet."""
MOST_WHOLE = 1 << 30
"""Bytes of a file of data that is read as a whole, unpacked."""

_BLOCK = 1 << 20


def read_again(read: Callable[[], T]) -> T:
    """Reads, and tries again after an error of the disk. Raises OSError when all attempts fail."""
    for wait_s in READ_AGAIN_AFTER_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise
        time.sleep(wait_s)
    return read()


class _NotedFile(io.FileIO):
    """A file to read, which keeps the last error of the disk; all that a BufferedReader reads, it reads so."""

    error: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        return self._noting(super().readinto, buffer)

    def readall(self) -> bytes:
        return self._noting(super().readall)

    def _noting(self, read: Callable[..., T], *arguments: Any) -> T:
        try:
            return read(*arguments)
        except OSError as error:
            self.error = error
            raise


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read. Raises the OSError of a disk that fails within it, whatever a library has made of that."""
    with _NotedFile(path) as noted, io.BufferedReader(noted, _BLOCK) as file:
        try:
            yield file
        finally:
            if noted.error is not None:
                raise noted.error from None


@contextmanager
def array_errors() -> Iterator[None]:
    """Around numpy.load and reading what it returns. Raises ValueError, of one line, for all that is no array.

    An OSError and a UserError stay what they are.
    """
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:  # there is no telling what a reader stumbles over in arbitrary bytes
        raise ValueError(shortened((str(error) or "it is empty").splitlines()[0])) from None


def read_whole(path: Path, most: int) -> bytes:
    """The content of a file. Raises OSError for one that is larger, and for what has no end or may wait for ever.

    Of pipes those are read that a shell has made for this command, `<(...)`.
    """

    def read() -> bytes:
        with path.open("rb") as file:
            return read_at_most(file, most)

    require_regular(path)
    return read_again(read)


def read_at_most(file: IO[bytes], most: int) -> bytes:
    """The rest of a file. Raises OSError when that is more, without having read it."""
    parts, left = [], most
    while part := file.read(_BLOCK):  # all at once would take the memory for the most that it may be
        left -= len(part)
        if left < 0:
            raise OSError(errno.EFBIG, f"is larger than {_size(most)}, the most that is read of such a file")
        parts.append(part)
    return b"".join(parts)


def require_regular(path: Path) -> None:
    """Raises OSError for a device, a socket, and a pipe that is not the shell's."""
    mode = path.stat().st_mode
    if stat_of.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    is_of_shell = stat_of.S_ISFIFO(mode) and str(path).startswith("/dev/")
    if not (stat_of.S_ISREG(mode) or is_of_shell):
        raise OSError(errno.EINVAL, "is no file, but a device or a pipe")


def lines_of(text: IO[str]) -> Iterator[str]:
    """The lines of a text, whatever ends them. Raises OSError for one that is longer than MOST_LINE."""
    while line := text.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise OSError(errno.EFBIG, f"has a line of more than {MOST_LINE:,} characters")
        yield line


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 30} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"


@contextmanager
def refusing_disk_errors(what: str, advice: str = "", numbers: Container[int] | None = None) -> Iterator[None]:
    """Makes a DiskError, which is a UserError, of what the file system says.

    what: the flag with its value, and what fails. numbers: of the errors that are meant; None means all.
    """
    try:
        yield
    except OSError as error:
        if numbers is not None and error.errno not in numbers:
            raise
        raise DiskError(f"{what}: {error.strerror or error}" + (f"; {advice}" if advice else "")) from None


def flush_path(path: Path) -> None:
    """Makes what was written to a file, or renamed in a folder, survive a loss of power.

    Of folders as far as the file system can: some have nothing to flush there, and say that it makes no sense.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file as a whole, durably: whatever happens, the old or the new content is there. Raises OSError."""
    with written_as_a_whole(path, path.with_suffix(".tmp")) as file:
        file.write(text)
    flush_path(path.parent)


@contextmanager
def written_as_a_whole(
    path: Path, temporary: Path, binary: bool = False, rename: Callable[[Path, Path], object] = Path.rename
) -> Iterator[IO[Any]]:
    """A file, by default of text, that takes its place when all of it is on the disk; if that fails, nothing changes.

    temporary: its name until then, in the same folder. rename: gives it its name. Raises OSError.
    """
    try:
        as_text: dict[str, Any] = {} if binary else {"encoding": "utf-8", "newline": ""}
        with temporary.open("wb" if binary else "w", **as_text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def stamp(path: Path) -> tuple[str, int, int]:
    """Changes when the file does: path, size in bytes, time of change in ns."""
    status = os.stat(path)
    return str(path), status.st_size, status.st_mtime_ns


def plain(value: Any, name: str = "it") -> Any:
    """A copy made of None, truth values, numbers, texts, lists, tuples, and dicts with texts or whole numbers as keys.

    Arrays, tensors and sets become lists, a set in an order of its own. name: what a message calls the value. Raises
    ValueError for whatever none of that says, with the name of the entry.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if hasattr(value, "tolist"):  # of numpy and torch
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, name): plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item, name) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        items = [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    kind = "a whole number of more than 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"
    raise ValueError(f"{name} is {kind}: must be a number, a text, None, or lists and mappings of these")


def _key(key: Any, name: str) -> Any:
    key = plain(key, f"a name in {name}")
    if type(key) not in (int, str):
        raise ValueError(f"{name} has the name {key!r}: must be a text or a whole number")
    return key


def alike(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; NaN equals NaN, and a tuple a list."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other or (one != one and other != other))


def without_nan(value: Any) -> Any:
    """A copy of a value with None for each NaN and infinity, in mappings and sequences of any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [without_nan(item) for item in value] if is_list else value


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics by name, as they were before they were written; an infinity comes back as NaN."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}
