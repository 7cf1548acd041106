"""The files of a data set by name, whether they lie in a folder or in a zip, compressed or not."""

import gzip
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from trainer.loading.errors import BadInput
from trainer.loading.files import ARCHIVE_ERRORS, stamp

_MOST_NAMES_SHOWN = 12


@dataclass(frozen=True)
class DataFile:
    """A file, or a member of a zip; gzip-compressed where its name ends so."""

    path: Path
    member: str | None = None

    @property
    def where(self) -> str:
        """The file as a message names it."""
        return f"--data-dir {self.path}" + (f", {self.member}" if self.member else "")

    @property
    def name(self) -> str:
        return PurePosixPath(self.member).name if self.member else self.path.name

    @property
    def bare_name(self) -> str:
        """In lower case, without .gz."""
        return self.name.lower().removesuffix(".gz")

    def read(self) -> bytes:
        """The content, unpacked in memory. Raises BadInput when it cannot be read or is damaged."""
        with _reading_errors(self.where):
            if self.member:
                with zipfile.ZipFile(self.path) as archive:
                    content = archive.read(self.member)
            else:
                content = self.path.read_bytes()
            return gzip.decompress(content) if self.name.lower().endswith(".gz") else content


@dataclass(frozen=True)
class DataFiles:
    """The files of one folder.

    where: the folder as a message names it.
    by_name: the files by their bare names.
    """

    where: str
    by_name: dict[str, DataFile]

    def find(self, *names: str) -> DataFile | None:
        """The file of the first of these names that there is."""
        return next((self.by_name[name] for name in names if name in self.by_name), None)

    def named(self, name: str) -> DataFile:
        """The file of this name. Raises BadInput when there is none."""
        file = self.find(name)
        if file is None:
            raise BadInput(f"{self.where}: no {name}; give a folder that has it; there are: {shown(self.by_name)}")
        return file

    def stamps(self, names: Iterable[str]) -> list[tuple[object, ...]]:
        """Changes when one of the files of these names does, comes or goes."""
        return [(*stamp(file.path), file.member) for name in names if (file := self.by_name.get(name))]


def find_files(path: Path, telling: Collection[str]) -> DataFiles:
    """The files of the one folder that has some of the telling names: path itself, a folder in it, or one of a zip.

    Where none has any, those of path itself. Raises BadInput when path cannot be read, when several folders can be
    meant, or when a file is there with .gz and without.
    """
    path = path.resolve()
    where = f"--data-dir {path}"
    if not path.exists():
        raise BadInput(f"{where}: no such file or folder; give the folder or the .zip of a data set")
    with _reading_errors(where):
        folders = _folders(path)
    meant = [folder for folder, files in folders.items() if not _bare_names(files).isdisjoint(telling)]
    if where not in meant and len(meant) > 1:
        raise BadInput(f"{where}: {len(meant)} folders in it can be the data set; give one of them alone")
    chosen = where if where in meant or not meant else meant[0]
    by_name: dict[str, DataFile] = {}
    for file in folders[chosen]:
        if (other := by_name.setdefault(file.bare_name, file)) is not file:
            raise BadInput(f"{chosen}: has {other.name} and {file.name}; keep one of them")
    return DataFiles(chosen, by_name)


def shown(names: Iterable[str]) -> str:
    """The names, or the first of them, for a message."""
    names = sorted(names)
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + ", ..." * (len(names) > _MOST_NAMES_SHOWN) or "no files"


def _folders(path: Path) -> dict[str, list[DataFile]]:
    """The visible files of path itself, and of the folders in it; by the names that messages give the folders."""
    where = f"--data-dir {path}"
    folders: dict[str, list[DataFile]] = {where: []}
    if path.is_dir():
        for file in sorted([*path.glob("*"), *path.glob("*/*")]):
            if file.is_file() and not _is_hidden(file.relative_to(path)):
                folders.setdefault(f"--data-dir {file.parent}", []).append(DataFile(file))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            members = [PurePosixPath(name) for name in sorted(archive.namelist()) if not name.endswith("/")]
        for member in members:
            # Archives packed on a Mac hold a shadow `._name` of every file.
            if not _is_hidden(member):
                folder = f"{where}, {member.parent}" if len(member.parts) > 1 else where
                folders.setdefault(folder, []).append(DataFile(path, str(member)))
    else:
        raise BadInput(f"{where}: is a single file; give the folder or the .zip that holds the data set")
    return folders


def _is_hidden(path: PurePath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _bare_names(files: Iterable[DataFile]) -> set[str]:
    return {file.bare_name for file in files}


@contextmanager
def _reading_errors(where: str) -> Iterator[None]:
    try:
        yield
    except ARCHIVE_ERRORS as error:
        raise BadInput(f"{where}: cannot be read or is damaged ({error}); fetch it again") from None
