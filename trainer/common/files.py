"""Reads files up to a size limit, writes files atomically, and converts values to plain JSON without NaN."""

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
"""Values of errno for a full disk, an exhausted quota, and a file above the size limit."""

READ_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)
"""Values of errno for disk and network errors that may not recur when a read is retried."""
NO_FILE = (errno.EISDIR, errno.EINVAL, errno.EFBIG)
"""Values of errno with which `read_whole` rejects a file that is not regular or is too large."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Values of errno of file systems without kernel locks, such as Lustre without the mount option `flock`."""
READ_AGAIN_AFTER_S = (0.1, 1.0)
"""Seconds to wait before the second and before the third attempt to read."""

FOLDER_GONE = "the folder was deleted or moved; if you moved it, move it back"

MOST_LINE = 1 << 20
"""Largest number of characters of a line that is read."""
MOST_RECORD = 64 << 20
"""Largest size in bytes of files such as settings, a run's record or an alphabet."""
MOST_WHOLE = 1 << 30
"""Largest size in bytes, after decompression, of a data file that is read into memory as a whole."""

_BLOCK = 1 << 20


def read_again(read: Callable[[], T]) -> T:
    """Returns the result of `read`, which is retried up to twice after READ_ERRORS. Raises the last error."""
    for wait_s in READ_AGAIN_AFTER_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise
        time.sleep(wait_s)
    return read()


class _NotedFile(io.FileIO):
    """Raw file that stores its last OSError, because a library that reads from it may suppress the error."""

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
    """Opens a file for buffered reading. Raises the OSError of a failed read even if a library suppressed it."""
    with _NotedFile(path) as noted, io.BufferedReader(noted, _BLOCK) as file:
        try:
            yield file
        finally:
            if noted.error is not None:
                raise noted.error from None


@contextmanager
def array_errors() -> Iterator[None]:
    """Converts exceptions of numpy.load, and of reading its result, to ValueError with a one-line message.

    OSError and UserError are not converted.
    """
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:  # arbitrary bytes can raise anything in a reader
        raise ValueError(shortened((str(error) or "it is empty").splitlines()[0])) from None


def read_whole(path: Path, most: int) -> bytes:
    """Reads a file of at most `most` bytes.

    Raises OSError for a larger file, a device, or a pipe that is not a shell's process substitution, `<(...)`.
    """

    def read() -> bytes:
        with path.open("rb") as file:
            return read_at_most(file, most)

    require_regular(path)
    return read_again(read)


def has_locked(lock: Callable[[Any, int], object], file: IO[Any] | int, how: int) -> bool:
    """Locks an open file with fcntl.flock or fcntl.lockf; returns False if its file system has no kernel locks.

    Raises OSError.
    """
    try:
        lock(file, how)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def read_at_most(file: IO[bytes], most: int) -> bytes:
    """Reads the rest of an open file. Raises OSError once the rest exceeds `most` bytes."""
    parts, left = [], most
    while part := file.read(_BLOCK):  # reading all at once would allocate `most` bytes
        left -= len(part)
        if left < 0:
            raise OSError(errno.EFBIG, f"is larger than {_size(most)}, the limit for such a file")
        parts.append(part)
    return b"".join(parts)


def require_regular(path: Path) -> None:
    """Raises OSError for a directory, a device, a socket, or a pipe that is not a shell's process substitution."""
    mode = path.stat().st_mode
    if stat_of.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    is_of_shell = stat_of.S_ISFIFO(mode) and str(path).startswith("/dev/")
    if not (stat_of.S_ISREG(mode) or is_of_shell):
        raise OSError(errno.EINVAL, "is a device or a pipe, not a regular file")


def lines_of(text: IO[str]) -> Iterator[str]:
    """Yields the lines of a text file. Raises OSError for a line of more than MOST_LINE characters."""
    while line := text.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise OSError(errno.EFBIG, f"has a line of more than {MOST_LINE:,} characters")
        yield line


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 30} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"


@contextmanager
def refusing_disk_errors(what: str, advice: str = "", numbers: Container[int] | None = None) -> Iterator[None]:
    """Converts OSError to DiskError, a UserError.

    what: the flag with its value, and the failed action. numbers: errno values to convert; all if None.
    """
    try:
        yield
    except OSError as error:
        if numbers is not None and error.errno not in numbers:
            raise
        raise DiskError(f"{what}: {reason_of(error, what)}" + (f"; {advice}" if advice else "")) from None


def reason_of(error: OSError, known: str) -> str:
    """Returns the reason of a disk error, after the path of its file unless `known` contains this path."""
    path = error.filename if isinstance(error.filename, str) else str(error.filename or "")
    if os.path.islink(path) and not os.path.exists(path):
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    return f"{'' if path in known else f'{path}: '}{error.strerror or error}"


def flush_path(path: Path) -> None:
    """Flushes a file's content, or the names in a folder, to disk (fsync).

    Ignores file systems that cannot flush folders.
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
    """Replaces a file atomically and durably. Raises OSError."""
    with written_as_a_whole(path, path.with_suffix(".tmp")) as file:
        file.write(text)
    flush_path(path.parent)


@contextmanager
def written_as_a_whole(
    path: Path, temporary: Path, binary: bool = False, rename: Callable[[Path, Path], object] = Path.rename
) -> Iterator[IO[Any]]:
    """Opens `temporary` for writing, and renames it to `path` once it is on disk; `path` is unchanged after an error.

    temporary: a path in the same folder. binary: False for UTF-8 text. Raises OSError.
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
    """Returns path, size in bytes and modification time in ns; leaves out ctime, which differs between equal copies."""
    status = os.stat(path)
    return str(path), status.st_size, status.st_mtime_ns


def plain(value: Any, name: str = "it") -> Any:
    """Converts a value to None, a bool, number or string, or a list, tuple or dict (keys: str or int) of these.

    Arrays and tensors become lists, and sets become sorted lists. name: noun for the value in messages. Raises
    ValueError, with the entry's name, for any other type.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if hasattr(value, "tolist"):  # arrays and tensors
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
    raise ValueError(f"{name} is {kind}, but must be a number, a string, None, or a list or dict of these")


def _key(key: Any, name: str) -> Any:
    key = plain(key, f"a key of {name}")
    if type(key) not in (int, str):
        raise ValueError(f"{name} has the key {key!r}, but keys must be strings or integers")
    return key


def alike(one: Any, other: Any) -> bool:
    """Returns whether two plain values are equal; NaN equals NaN, and a tuple equals a list with equal items."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other or (one != one and other != other))


def without_nan(value: Any) -> Any:
    """Copies a nested value, with None in place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [without_nan(item) for item in value] if is_list else value


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Copies metrics by name, with NaN in place of None."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}
