"""Reads the files of a corpus in a folder, a zip or a tar archive."""

import gzip
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data.files import ARCHIVE_ERRORS, BoundedHeader, ZipArchive, is_visible, single
from data.speech.audio_files import SUFFIXES
from data.table_files import LeftOut, decoded, opened_table
from trainer.common.errors import UserError
from trainer.common.files import DISK_FULL, read_at_most, read_whole, refusing_disk_errors

MOST_SOUND = 4 << 30
"""Largest size of a recording in bytes; a WAV file cannot be larger."""
MOST_UNPACKED = 100
"""An archive may unpack to this many times its size, plus MOST_SOUND bytes."""
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
_ROOM = "choose a folder with enough space for the unpacked archive"
MANIFESTS = (".json", ".jsonl")


@dataclass(frozen=True)
class Source:
    """Files of a corpus.

    path: the folder or archive. names: sorted paths of visible files, relative to `path`, with "/".
    reads_outside: whether `read` accepts files outside `path`. left_out: records dropped utterances and the encoding.
    read: returns the content of a file by name; raises KeyError if an archive lacks the file, or one of ARCHIVE_ERRORS.
    """

    path: Path
    names: tuple[str, ...]
    reads_outside: bool
    read: Callable[[str], bytes]
    left_out: LeftOut

    def where(self, name: str = "") -> str:
        return f"--data-dir {self.path}" + (f", {name}" if name else "")

    def read_text(self, name: str) -> str:
        """Raises UserError if the file cannot be read or decoded."""
        try:
            return decoded(self.read(name), self.where(name), self.left_out)
        except ARCHIVE_ERRORS as error:
            raise UserError(f"{self.where(name)}: cannot be read ({error}); download it again") from None


def find(path: Path) -> Path:
    """Returns the path or, for a folder with one archive and no sound files or manifests, the archive's path.

    Raises UserError if the path does not exist, or if there are several archives.
    """
    path = path.resolve()
    if not path.exists():
        raise UserError(f"--data-dir {path}: no such file or folder; give a folder, archive or manifest of recordings")
    if path.is_dir():
        with refusing_disk_errors(f"--data-dir {path}"):
            archives = [file for file in sorted(path.iterdir()) if is_archive(file)]
        if archives and not any(name.lower().endswith((*SUFFIXES, *MANIFESTS)) for name in _names_in(path)):
            if len(archives) > 1:
                shown = ", ".join(file.name for file in archives)
                raise UserError(
                    f"--data-dir {path}: contains {len(archives)} archives ({shown}); give the path of one archive"
                )
            return archives[0]
    return path


def is_archive(path: Path) -> bool:
    """Returns whether a path is an archive, judged by the file's name."""
    return path.name.lower().endswith(ARCHIVES) and path.is_file()


@contextmanager
def opened(path: Path, cache_dir: Path, left_out: LeftOut) -> Iterator[Source]:
    """Opens a folder, an archive, or a manifest.

    cache_dir: existing folder for a temporary file with the content of a compressed tar; the file is deleted even if
    the process is killed. Raises UserError if an archive is damaged or contains a name that points outside the archive.
    """
    if path.is_dir():
        yield Source(path, tuple(_names_in(path)), True, lambda name: read_whole(path / name, MOST_SOUND), left_out)
    elif is_archive(path):
        is_zip = path.name.lower().endswith(".zip")
        with ExitStack() as stack:
            try:
                most = MOST_SOUND + MOST_UNPACKED * path.stat().st_size
                names, read = stack.enter_context(_zip(path, most) if is_zip else _tar(path, cache_dir, most))
            except ARCHIVE_ERRORS as error:
                raise UserError(
                    f"--data-dir {path}: is damaged, or is not an archive ({error}); download it again"
                ) from None
            yield Source(path, tuple(_visible(path, names)), False, read, left_out)
    elif path.name.lower().endswith(MANIFESTS):
        yield Source(path.parent, (path.name,), True, lambda name: read_whole(path.parent / name, MOST_SOUND), left_out)
    else:
        if not path.name.lower().endswith(SUFFIXES):
            with opened_table(single(path, "--data-dir"), left_out):
                pass  # raises UserError if the file has a known unsupported format
        raise UserError(
            f"--data-dir {path}: is not a folder, archive ({', '.join(ARCHIVES)}) or manifest (.json, .jsonl); give "
            "the folder with the sound files"
        )


def _names_in(folder: Path) -> list[str]:
    """Returns the names of all visible files in a folder, at any depth, including linked files."""
    names = []
    # for many utterances, strings use less memory than Path objects
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(Path(parent, name))]
        inside = "" if (relative := os.path.relpath(parent, folder)) == "." else relative + "/"
        names += [inside + name for name in files if not name.startswith(".")]
    return sorted(names)


def _leads_back(link: Path) -> bool:
    """Returns whether a link leads to a folder that contains the link."""
    return link.is_symlink() and link.resolve() in (folder.resolve() for folder in link.parents)


Archive = tuple[Iterable[str], Callable[[str], bytes]]
"""Names of the files of an archive, and a function that reads a file."""


@contextmanager
def _zip(path: Path, most: int) -> Iterator[Archive]:
    with ZipArchive(path) as archive:
        _require_fits(sum(member.file_size for member in archive.infolist()), path, most)
        yield [name for name in archive.namelist() if not name.endswith("/")], lambda name: _member(archive, name)


def _member(archive: ZipArchive, name: str) -> bytes:
    with archive.open(name) as file:
        return read_at_most(file, MOST_SOUND)


@contextmanager
def _tar(path: Path, cache_dir: Path, most: int) -> Iterator[Archive]:
    with open(path, "rb") as packed, tempfile.TemporaryFile(dir=cache_dir) as unpacked:
        # unpacked, since seeking backwards in a compressed tar decompresses the tar from its beginning
        if is_packed := not path.name.lower().endswith(".tar"):
            with refusing_disk_errors(f"--cache-dir {cache_dir}", _ROOM, DISK_FULL), gzip.open(packed) as content:
                while part := content.read(1 << 20):
                    _require_fits(unpacked.tell() + len(part), path, most)
                    unpacked.write(part)
            unpacked.seek(0)
        with tarfile.open(fileobj=unpacked if is_packed else packed, mode="r:", tarinfo=BoundedHeader) as archive:
            members = {member.name.removeprefix("./"): member for member in archive if member.isfile()}
            yield members, lambda name: _content(archive, members[name])


def _require_fits(num_bytes: int, path: Path, most: int) -> None:
    if num_bytes > most:
        raise UserError(
            f"--data-dir {path}: unpacks to more than {most:,} bytes, {MOST_UNPACKED} times its size, which is "
            "implausible for recordings; unpack it, and give the folder"
        )


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, member.name  # isfile() excludes links, folders and devices
    return read_at_most(file, MOST_SOUND)


def _visible(path: Path, names: Iterable[str]) -> list[str]:
    visible = sorted(name for name in names if is_visible(name))
    for name in visible:
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise UserError(
                f"--data-dir {path}: contains the name {name!r}, which points outside the archive; pack the "
                "archive again"
            )
    return visible
