"""Which checkpoints stay in a run directory, and the links that name the important ones."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.checkpoint.lock import Writer
from trainer.checkpoint.manifest import Entry, best_first, newest_best
from trainer.flags import CheckpointFlags
from trainer.task import Task

LINKS = ("last.pth", "best.pth", "final.pth")


def update_links(folder: Path, entries: Sequence[Entry], is_finished: bool, writer: Writer) -> None:
    """Points last.pth, best.pth and, if the run is finished, final.pth to their checkpoints. Raises OSError."""
    newest = entries[-1] if entries else None
    for name, entry in zip(LINKS, (newest, newest_best(entries), newest if is_finished else None), strict=True):
        if entry is not None:
            link(folder / name, folder / entry.file, writer)


def link(name: Path, file: Path, writer: Writer) -> None:
    """Gives a file a second name: a hard link, or a copy where the file system has none. Raises OSError."""
    if name.exists() and name.samefile(file):
        return
    temporary = writer.temporary(name.with_suffix(".link.pth"))
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copyfile(file, temporary)
        writer.rename(temporary, name)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest, 0 is all of them, and the best beside them; mode: which value is best."""

    newest: int
    best: int = 1
    mode: Literal["max", "min"] = "max"


def retention_of(flags: CheckpointFlags, task: Task) -> Retention:
    """Which checkpoints stay of a run of this task."""
    return Retention(flags.keep_checkpoints, flags.keep_best, mode=task.monitor[1])


def evict(
    folder: Path,
    entries: Sequence[Entry],
    retention: Retention,
    is_intact: Callable[[Entry], bool],
    writer: Writer,
) -> list[Entry]:
    """Deletes the files that need not stay; returns the entries that do. entries: oldest first.

    Only intact files count as kept, so that damage to newer or better ones never costs the last good one. The manifest
    forgets what was deleted at the next save: an entry without a file is ignored. Raises OSError, LockTaken.
    """
    if retention.newest == 0:
        return list(entries)
    best = _first_intact(best_first(entries, retention.mode), retention.best, is_intact)
    kept = [*best, *_first_intact(entries[::-1], retention.newest, is_intact)]
    for entry in entries:
        if entry not in kept:
            writer.delete(folder / entry.file)
    return [entry for entry in entries if entry in kept]


def _first_intact(entries: Sequence[Entry], num: int, is_intact: Callable[[Entry], bool]) -> list[Entry]:
    """The first entries, damaged ones among them, until so many are intact."""
    found: list[Entry] = []
    for entry in entries:
        if num == 0:
            break
        found.append(entry)
        num -= is_intact(entry)
    return found
