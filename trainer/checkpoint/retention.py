"""Which checkpoints stay in a run directory, and the links that name the important ones."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint.manifest import Entry, newest_best

LINKS = ("last.pth", "best.pth", "final.pth")


def update_links(folder: Path, entries: Sequence[Entry], is_finished: bool) -> None:
    """Points last.pth, best.pth and, if the run is finished, final.pth to their checkpoints. Raises OSError."""
    newest = entries[-1] if entries else None
    for name, entry in zip(LINKS, (newest, newest_best(entries), newest if is_finished else None), strict=True):
        if entry is not None:
            link(folder / name, folder / entry.file)


def link(name: Path, file: Path) -> None:
    """Gives a file a second name: a hard link, or a copy where the file system has none. Raises OSError."""
    if name.exists() and name.samefile(file):
        return
    temporary = name.with_suffix(".link.tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copyfile(file, temporary)
        temporary.rename(name)
    finally:
        temporary.unlink(missing_ok=True)


def evict(folder: Path, entries: Sequence[Entry], keep: int, is_intact: Callable[[Entry], bool]) -> list[Entry]:
    """Deletes the oldest files beyond `keep` (0: none), never the best or the newest; returns the entries that stay.

    Only intact files count as kept, so that damage to newer ones never costs the last good one. The manifest forgets
    what was deleted at the next save: an entry without a file is ignored. Raises OSError.
    """
    if keep == 0:
        return list(entries)
    kept: list[Entry] = []
    num_intact, has_best = 0, False
    for entry in reversed(entries):
        if num_intact < keep or (entry.best and not has_best):
            intact = is_intact(entry)
            num_intact += intact
            has_best = has_best or (entry.best and intact)
            kept.insert(0, entry)
        else:
            (folder / entry.file).unlink(missing_ok=True)
    return kept
