"""Finds and reads files of a folder or an archive by name; archives are never unpacked to disk."""

import bz2
import errno
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self, cast

from trainer.common.errors import UserError
from trainer.common.files import MOST_WHOLE, read_at_most, require_regular, stamp

_ZSTD_ERROR = getattr(getattr(zipfile, "zstd", None), "ZstdError", zlib.error)
"""Exception that Python 3.14 and newer raise for a damaged Zstandard-compressed zip member."""
ARCHIVE_ERRORS = (
    *(OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError),
    *(zlib.error, lzma.LZMAError, _ZSTD_ERROR),
)
"""Exceptions from reading a damaged archive; RuntimeError is raised for encrypted members of a zip."""
_PACKED: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
"""Maps a compressed file's first bytes to the function that opens the file."""
_OF_PACKED = (".gz", ".bz2", ".xz")
_READ_BYTES = 1 << 16
_MOST_HEADER = 1 << 20
_READ_WHOLE = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip
"""Types of tar headers whose content, at most _MOST_HEADER bytes here, tarfile reads at once."""
_MOST_NAMES_SHOWN = 12
_MOST_OF_A_REASON = 200


class ZipArchive(zipfile.ZipFile):
    """Zip archive that raises BadZipFile for damaged content, even where zipfile raises ValueError."""

    def __init__(self, file: Path | IO[bytes]) -> None:
        with _damage_of_zip():
            super().__init__(file)

    def open(self, *arguments: Any, **options: Any) -> IO[bytes]:
        with _damage_of_zip():
            return super().open(*arguments, **options)


@contextmanager
def _damage_of_zip() -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # raised for a name that is not UTF-8, or a negative offset
        raise zipfile.BadZipFile(str(error)) from None


class Source(ABC):
    """Folder or archive of files that are named by relative paths with "/". where: its name in messages."""

    def __init__(self, path: Path, where: str | None = None) -> None:
        self.path = path
        self.where = where or f"--data-dir {path}"

    @cached_property
    def files(self) -> list["DataFile"]:
        """Files that are not hidden, sorted by name. Raises UserError if the files cannot be listed."""
        with reading_errors(self.where):
            return [DataFile(self, name) for name in sorted(self.names()) if is_visible(name)]

    def where_of(self, name: str) -> str:
        """Returns a file's name for messages, with its folder or archive."""
        return f"{self.where}, {name}"

    def stamp(self, name: str) -> tuple[str | int, ...]:
        """Returns a value that changes when the file changes."""
        return (*stamp(self.path), name)

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Returns the names of all files, including hidden files. May raise any of ARCHIVE_ERRORS."""

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a file without decompressing it. Raises FileNotFoundError, or another of ARCHIVE_ERRORS."""


@dataclass(frozen=True)
class DataFile:
    """File in a folder or archive; the file may be compressed with gzip, bzip2 or xz."""

    source: Source
    name: str

    @property
    def where(self) -> str:
        return self.source.where_of(self.name)

    @property
    def bare_name(self) -> str:
        """File name in lower case, without folders and without a compression suffix."""
        path = PurePosixPath(self.name.lower())
        return path.stem if path.suffix in _OF_PACKED else path.name

    @property
    def stamp(self) -> tuple[str | int, ...]:
        return self.source.stamp(self.name)

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Opens the decompressed content as a context manager; raises UserError if opening or reading it fails."""
        with reading_errors(self.where), self.source.open(self.name) as stored, _unpacked(self.name, stored) as content:
            yield content

    def read(self) -> bytes:
        """Reads the decompressed content. Raises UserError for read errors and for more than MOST_WHOLE bytes."""
        with self.open() as file:
            return read_at_most(file, MOST_WHOLE)


class Folder(Source):
    """Files of a folder. depth: number of folder levels to include; 1 means only files in the folder itself."""

    def __init__(self, path: Path, where: str | None = None, depth: int = 1) -> None:
        super().__init__(path, where)
        self._depth = depth

    def where_of(self, name: str) -> str:
        return f"{self.where}/{name}"

    def stamp(self, name: str) -> tuple[str | int, ...]:
        return stamp(self.path / name)

    def names(self) -> Iterable[str]:
        for depth in range(self._depth):
            for file in self.path.glob("*/" * depth + "*"):
                if file.is_file():
                    yield file.relative_to(self.path).as_posix()

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        require_regular(self.path / name)
        return open(self.path / name, "rb")


class _Single(Folder):
    """Folder from which only one file, given by a flag, is read."""

    def where_of(self, name: str) -> str:
        return self.where


class Zip(Source):
    """Zip archive. content: bytes of the archive if it is not a file on disk."""

    def __init__(self, path: Path, where: str | None = None, content: bytes | None = None) -> None:
        super().__init__(path, where)
        self._content = content
        self._opened: tuple[int, ZipArchive] | None = None

    def names(self) -> Iterable[str]:
        names = self._archive().namelist()
        if "xl/workbook.xml" in names:
            raise not_read(self.where, "Excel's .xlsx", "excel")
        return (name for name in names if not name.endswith("/"))

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        try:
            return self._archive().open(name)
        except KeyError:
            raise _missing() from None

    def _archive(self) -> ZipArchive:
        """Opens the archive once per process, since processes that share an open file also share the position in it."""
        if self._opened is None or self._opened[0] != os.getpid():
            content = self.path if self._content is None else io.BytesIO(self._content)
            self._opened = os.getpid(), ZipArchive(content)
        return self._opened[1]


class BoundedHeader(tarfile.TarInfo):
    """Header of a tar member. Raises tarfile.ReadError for an implausibly long name or list of attributes."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _READ_WHOLE and found.size > _MOST_HEADER:
            raise tarfile.ReadError(f"a member has a header of {found.size} bytes")
        return found


class TarGz(Source):
    """Gzipped tar archive. Opening a file reads the archive from its start."""

    def names(self) -> Iterable[str]:
        return (name for name, _ in self._members())

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with closing(self._members()) as members:
            for found, stored in members:
                if found == name:
                    # the members of a streamed tar are not seekable
                    yield io.BytesIO(read_at_most(stored, MOST_WHOLE))
                    return
            raise _missing()

    def _members(self) -> Generator[tuple[str, IO[bytes]], None, None]:
        with gzip.open(self.path) as unpacked:
            with tarfile.open(fileobj=unpacked, mode="r|", bufsize=_READ_BYTES, tarinfo=BoundedHeader) as archive:
                for member in archive:
                    if content := archive.extractfile(member) if member.isfile() else None:
                        yield str(PurePosixPath(member.name)), content
            while unpacked.read(_READ_BYTES):  # reading to the end verifies the checksum
                pass


def source_at(path: Path, depth: int, advice: str, flag: str = "--data-dir") -> Source | None:
    """Opens a folder or an archive as a `Source`; returns None for any other file.

    depth: number of folder levels to include. advice: end of the error message for a path that does not exist. flag:
    command-line flag that sets the path.
    """
    where = f"{flag} {path}"
    with reading_errors(where):
        if not path.exists():
            raise UserError(f"{where}: no such file or folder; {advice}")
        if path.is_dir():
            os.scandir(path).close()  # raises for an unreadable folder; `glob` would silently find no files
            return Folder(path, where, depth=depth)
        require_regular(path)
        name, is_zip = path.name.lower(), False
        if path.is_file():  # reading would remove the first bytes of a pipe
            with path.open("rb") as file:
                is_zip = file.read(4) == b"PK\3\4"
    if name.endswith(".zip") or is_zip:
        return Zip(path, where)
    return TarGz(path, where) if name.endswith((".tar.gz", ".tgz")) else None


def single(path: Path, flag: str) -> DataFile:
    """Returns the file at a path. flag: command-line flag that sets the path."""
    return DataFile(_Single(path.parent, f"{flag} {path}"), path.name)


def not_read(where: str, what: str, section: str) -> UserError:
    """Builds the UserError for a format that the user must convert. section: anchor in docs/formats.md."""
    return UserError(
        f"{where}: is {what}, which cannot be read directly: docs/formats.md#{section} shows how to convert it"
    )


@contextmanager
def reading_errors(where: str) -> Iterator[None]:
    """Converts errors from reading files and archives to UserError. where: the file's name in messages."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{where}: {error.strerror or error}; restore this file, or download the data again") from None
    except ARCHIVE_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        told = str(reason)[:_MOST_OF_A_REASON]  # cut, since messages about damaged zips may contain the file's bytes
        raise UserError(f"{where}: cannot be read or is damaged ({told}); download it again") from None


def shown(names: Iterable[str]) -> str:
    """Sorts names, and joins the first few with commas for a message."""
    names = sorted(names)
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + ", ..." * (len(names) > _MOST_NAMES_SHOWN) or "no files"


def is_visible(name: str) -> bool:
    """Returns False if a file or folder in a path is hidden, like the `._name` files that macOS adds to archives."""
    return not any(part.startswith(".") and part != ".." for part in PurePosixPath(name).parts)


def _unpacked(name: str, stored: IO[bytes]) -> IO[bytes]:
    """Returns a file's decompressed stream; detects the compression by the first bytes or a name that ends in .gz."""
    stored = stored if hasattr(stored, "peek") else cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, stored)))
    head = cast(io.BufferedReader, stored).peek(6)
    by_name = gzip.open if name.lower().endswith(".gz") else None
    unpack = next((unpack for start, unpack in _PACKED.items() if head.startswith(start)), by_name)
    return stored if unpack is None else cast(IO[bytes], unpack(stored))


def _missing() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "not in the archive")
