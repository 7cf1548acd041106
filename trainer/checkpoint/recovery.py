"""Which checkpoints a run directory holds, whatever has happened to its files."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.file import size_and_sum
from trainer.checkpoint.manifest import (
    CHECKPOINT_NAME,
    MANIFEST,
    DamagedManifest,
    Entry,
    newest_best,
    read_manifest,
    unused_path,
)
from trainer.checkpoint.reader import read_or_say
from trainer.checkpoint.records import RESULTS, read_json
from trainer.checkpoint.retention import LINKS, link
from trainer.loading.files import flush_path
from trainer.loading.order import Position


def find_checkpoints(folder: Path, say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """The checkpoints, oldest first, whose files may not have their names yet; without any, the traces of lost ones.

    Changes nothing. say: gets a line for whatever is damaged. Raises OSError.
    """
    listed = _listed(folder, say)
    best = newest_best(listed)
    # The others that are not there were evicted; these two never are.
    missing = [entry for entry in listed if entry in (listed[-1], best) and not (folder / entry.file).is_file()]
    if missing:
        files = _files_under_other_names(folder, [entry.file for entry in listed])
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


def put_in_place(folder: Path, entries: Sequence[Entry], say: Callable[[str], None]) -> None:
    """Gives checkpoints that were found under another name their own. Raises OSError."""
    for entry in entries:
        if CHECKPOINT_NAME.fullmatch(entry.file):
            continue
        source, target = folder / entry.file, unused_path(folder, Position(entry.epoch, entry.phase, entry.samples))
        link(target, source)
        flush_path(folder)
        entry.file = target.name
        if source.suffix == ".pth":
            say(f"{target} was missing: restored from {source.name}.")


def set_aside(path: Path) -> None:
    """Renames a damaged checkpoint, which loses its links. Raises OSError."""
    for name in LINKS:
        link_to = path.with_name(f"{name}.pth")
        if link_to.exists() and link_to.samefile(path):
            link_to.unlink()
    path.rename(path.with_suffix(".damaged"))


def _listed(folder: Path, say: Callable[[str], None]) -> list[Entry]:
    """What the manifest says, if there is one."""
    try:
        return read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        return []
    except DamagedManifest:
        say(f"{folder / MANIFEST} is damaged.")
        return []


def _files_under_other_names(folder: Path, listed: Sequence[str]) -> dict[str, str]:
    """sha256 -> file that is not under its name.

    A link may have outlived its checkpoint, and a kill may have come just before a complete file got its name.
    """
    present = [file for file in listed if (folder / file).is_file()]
    found = {}
    for file in [*_links_beside(folder, present), *sorted(path.name for path in folder.glob("checkpoint_*.tmp"))]:
        with suppress(OSError):  # a job that saves at this moment renames them
            found[size_and_sum(folder / file)["sha256"]] = file
    return found


def _links_beside(folder: Path, present: Sequence[str]) -> list[str]:
    """The links that are more than another name of one of these files."""
    paths = [folder / f"{name}.pth" for name in LINKS]
    return [path.name for path in paths if path.is_file() and not any(path.samefile(folder / file) for file in present)]


def _entries_from_files(folder: Path, say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """Rebuilds what a lost manifest knew from the checkpoints themselves: (entries, what is lost)."""
    checkpoints = sorted(path.name for path in folder.glob("checkpoint_*.pth") if path.is_file())
    entries: dict[str, Entry] = {}
    lost: list[str] = []
    for file in [*checkpoints, *_links_beside(folder, checkpoints)]:
        state = read_or_say(folder / file, say)
        if state is None:
            lost.append(f"{file} is damaged")
        else:
            entry = _entry(state, folder / file)
            entries.setdefault(entry.sha256, entry)
    if entries:
        say(f"{MANIFEST} had no usable entry: rebuilt from {len(entries)} checkpoint files.")
    return sorted(entries.values(), key=lambda entry: entry.step), lost


def _entry(state: dict[str, Any], path: Path) -> Entry:
    """What the manifest says of a checkpoint, from nothing but its content."""
    best = state["best"]
    is_best = best is not None and Position(**state["position"]).is_end_of(best["epoch"])
    return Entry.of(state, path.name, best["value"] if is_best else None, is_best, size_and_sum(path))
