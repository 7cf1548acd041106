"""The files of a data set by name, whether they lie in a folder or in an archive, compressed or not."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data.files import DataFile, Source, shown, single, source_at
from trainer.common.errors import UserError


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
        """The file of this name. Raises UserError when there is none."""
        file = self.find(name)
        if file is None:
            raise UserError(f"{self.where}: no {name}; give a folder that has it; there are: {shown(self.by_name)}")
        return file

    def stamps(self, names: Iterable[str]) -> list[tuple[object, ...]]:
        """Changes when one of the files of these names does, comes or goes."""
        return [file.stamp for name in names if (file := self.by_name.get(name))]


def find_files(path: Path, telling: Collection[str]) -> DataFiles:
    """The files of the one folder that has some of the telling names: path itself, or a folder in it.

    Where none has any, those of path itself, or of the only folder in it. path: a file, a folder or an archive. Raises
    UserError when it cannot be read, when several folders can be meant, or when a file is there with .gz and without.
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
        raise UserError(f"{where}: {len(meant)} folders in it can be the data set; give one of them alone")
    found = meant or [folder for folder, files in folders.items() if files]
    chosen = where if where in meant or len(found) != 1 else found[0]
    by_name: dict[str, DataFile] = {}
    for file in folders[chosen]:
        if (other := by_name.setdefault(file.bare_name, file)) is not file:
            raise UserError(f"{chosen}: has {other.name} and {file.name}; keep one of them")
    return DataFiles(chosen, by_name)


def _folders(source: Source) -> dict[str, list[DataFile]]:
    """The files of the source itself, and of the folders in it; by the names that messages give the folders."""
    folders: dict[str, list[DataFile]] = {source.where: []}
    for file in source.files:
        folder = str(PurePosixPath(file.name).parent)
        folders.setdefault(source.where if folder == "." else source.where_of(folder), []).append(file)
    return folders


def _bare_names(files: Iterable[DataFile]) -> set[str]:
    return {file.bare_name for file in files}
