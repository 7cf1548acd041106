"""Finds the files of a data set by name, in a folder or an archive."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data.files import DataFile, Source, shown, single, source_at
from trainer.common.errors import UserError


@dataclass(frozen=True)
class DataFiles:
    """Files of one folder.

    where: name of the folder in messages. by_name: files by lower-case name without compression suffix.
    """

    where: str
    by_name: dict[str, DataFile]

    def find(self, *names: str) -> DataFile | None:
        """Returns the first of the named files that exists, or None."""
        return next((self.by_name[name] for name in names if name in self.by_name), None)

    def named(self, name: str) -> DataFile:
        """Returns the named file. Raises UserError if the file is missing."""
        file = self.find(name)
        if file is None:
            raise UserError(
                f"{self.where}: has no {name}; give a folder that contains this file; files found: "
                f"{shown(self.by_name)}"
            )
        return file

    def stamps(self, names: Iterable[str]) -> list[tuple[object, ...]]:
        """Returns values that change when a file with one of the names changes, appears or disappears."""
        return [file.stamp for name in names if (file := self.by_name.get(name))]


def find_files(path: Path, telling: Collection[str]) -> DataFiles:
    """Finds the folder of a data set: `path`, or a folder in it, that contains a file with a name in `telling`.

    If no folder contains such a file, returns the files of `path` or of its only folder. path: a file, a folder or an
    archive. Raises UserError if the path cannot be read, if several folders qualify, or if a file exists both plain and
    compressed.
    """
    path = path.resolve()
    where = f"--data-dir {path}"
    source = source_at(path, depth=2, advice="give the folder or the .zip of a data set")
    if source is None:
        file = single(path, "--data-dir")
        return DataFiles(where, {file.bare_name: file})
    folders = _folders(source)
    meant = [folder for folder, files in folders.items() if not _bare_names(files).isdisjoint(telling)]
    if where not in meant and len(meant) > 1:
        raise UserError(f"{where}: {len(meant)} of its folders could be the data set; give the path of one folder")
    found = meant or [folder for folder, files in folders.items() if files]
    chosen = where if where in meant or len(found) != 1 else found[0]
    by_name: dict[str, DataFile] = {}
    for file in folders[chosen]:
        if (other := by_name.setdefault(file.bare_name, file)) is not file:
            raise UserError(f"{chosen}: has {other.name} and {file.name}; keep one of them")
    return DataFiles(chosen, by_name)


def _folders(source: Source) -> dict[str, list[DataFile]]:
    """Maps each folder's name, as shown in messages, to the folder's files; the top folder comes first."""
    folders: dict[str, list[DataFile]] = {source.where: []}
    for file in source.files:
        folder = str(PurePosixPath(file.name).parent)
        folders.setdefault(source.where if folder == "." else source.where_of(folder), []).append(file)
    return folders


def _bare_names(files: Iterable[DataFile]) -> set[str]:
    return {file.bare_name for file in files}
