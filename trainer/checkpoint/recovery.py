"""Which checkpoints a run directory holds, whatever has happened to its files."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.file import OtherVersion, read_checkpoint, size_and_sum
from trainer.checkpoint.format import CHECKPOINT_NAME
from trainer.checkpoint.lock import Writer
from trainer.checkpoint.manifest import MANIFEST, Entry, newest_best, read_manifest, unused_path
from trainer.checkpoint.records import RESULTS, read_json
from trainer.checkpoint.retention import LINKS, link
from trainer.common.errors import DiskError, UserError
from trainer.common.files import flush_path


def claim_temporary_files(folder: Path, writer: Writer) -> None:
    """Takes them away from an earlier holder, who may be alive and about to rename one; see `trainer.checkpoint.lock`.

    Checkpoints stay, under another name: one that the manifest has is complete. Raises OSError.
    """
    for path in folder.glob("*.tmp"):
        with suppress(FileNotFoundError):  # it has just been renamed
            if path.name.startswith("checkpoint_"):
                writer.rename(path, writer.temporary(path))
            else:
                writer.delete(path)


def find_checkpoints(folder: Path, say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """The checkpoints, oldest first, whose files may not have their names yet; without any, the traces of lost ones.

    Changes nothing. say: gets a line for whatever is damaged. Raises OSError.
    """
    listed = read_manifest(folder / MANIFEST, say)
    best = newest_best(listed)
    # The others that are not there were evicted; these two never are.
    missing = [entry for entry in listed if entry in (listed[-1], best) and not (folder / entry.file).is_file()]
    if missing:
        files = _files_under_other_names(folder)
        for entry in missing:
            entry.file = files.get(entry.sha256, entry.file)
    entries = [entry for entry in listed if (folder / entry.file).is_file()]
    if entries:
        return entries, []
    entries, lost = _entries_from_files(folder, say)
    lost += [f"{entry.file} is missing" for entry in missing]
    if read_json(folder / RESULTS):
        lost.append(f"{RESULTS} is of a run that had some")
    return entries, [] if entries else lost


def put_in_place(folder: Path, entries: Sequence[Entry], say: Callable[[str], None], writer: Writer) -> None:
    """Gives checkpoints that were found under another name their own. Raises OSError."""
    for entry in entries:
        if re.fullmatch(CHECKPOINT_NAME, entry.file):
            continue
        source, target = folder / entry.file, unused_path(folder, entry.position)
        link(target, source, writer)
        flush_path(folder)
        entry.file = target.name
        if source.suffix == ".pth":
            say(f"{target} was missing: restored from {source.name}.")


def set_aside(path: Path, writer: Writer) -> None:
    """Renames a damaged checkpoint, which loses its links. Raises OSError, LockTaken."""
    for name in LINKS:
        link_to = path.with_name(name)
        if link_to.exists() and link_to.samefile(path):
            writer.delete(link_to)
    writer.rename(path, path.with_suffix(".damaged"))


def _files_under_other_names(folder: Path) -> dict[str, str]:
    """sha256 -> file: a link may have outlived its checkpoint, and a kill come just before a file got its name."""
    found = {}
    for path in [*(folder / name for name in LINKS), *sorted(folder.glob("checkpoint_*.tmp"))]:
        with suppress(FileNotFoundError):  # there is no such link, or a job that saves at this moment renames them
            found[size_and_sum(path)["sha256"]] = path.name
    return found


def _entries_from_files(folder: Path, say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """Rebuilds what a lost manifest knew from the checkpoints themselves: (entries, what is lost)."""
    files: dict[int, Path] = {}
    for path in [*sorted(folder.glob("checkpoint_*.pth")), *(folder / name for name in LINKS)]:
        if path.is_file():
            files.setdefault(path.stat().st_ino, path)  # of the names of one file the first
    entries: dict[str, Entry] = {}
    lost: list[str] = []
    for path in files.values():
        try:
            state = read_checkpoint(path, str(path))
        except DiskError:
            raise
        except UserError as error:
            say(str(error))
            what = "of another version of the trainer" if isinstance(error, OtherVersion) else "damaged"
            lost.append(f"{path.name} is {what}")
            continue
        entry = Entry.of(state, path.name, size_and_sum(path))
        entries.setdefault(entry.sha256, entry)
    if entries:
        say(f"{MANIFEST} had no usable entry: rebuilt from {len(entries)} checkpoint files.")
    return sorted(entries.values(), key=lambda entry: entry.step), lost
