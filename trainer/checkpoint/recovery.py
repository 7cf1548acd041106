"""Which checkpoints a run directory holds, whatever has happened to its files."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.file import read_checkpoint, size_and_sum
from trainer.checkpoint.manifest import MANIFEST, DamagedManifest, Entry, read_manifest
from trainer.loading.errors import BadInput
from trainer.loading.order import Position

LINKS = ("last", "best", "final")


@dataclass(frozen=True)
class Inventory:
    """entries: oldest first; the file of one may not have its proper name yet. lost: without any, signs of some."""

    entries: list[Entry]
    lost: list[str]


def take_inventory(folder: Path, say: Callable[[str], None]) -> Inventory:
    """Changes nothing. say: gets a line for whatever is damaged. Raises OSError."""
    listed: list[Entry] = []
    try:
        listed = read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        pass
    except DamagedManifest:
        say(f"{folder / MANIFEST} is damaged.")
    # The others that are not there were evicted; these two never are.
    wanted = [listed[-1], *(entry for entry in reversed(listed) if entry.best)][:2] if listed else []
    entries = [entry for entry in listed if (folder / entry.file).is_file() or entry in wanted]
    missing = _find_elsewhere(folder, entries)
    entries = [entry for entry in entries if entry not in missing]
    if entries:
        return Inventory(entries, [])
    entries, damaged = _entries_from_files(folder, say)
    lost = [f"{file} is damaged" for file in damaged] + [f"{entry.file} is missing" for entry in missing]
    return Inventory(entries, lost)


def read_or_say(path: Path, say: Callable[[str], None], verified: bool = False) -> dict[str, Any] | None:
    """A checkpoint, or None and a line about what is wrong with it. verified: see `read_checkpoint`."""
    try:
        return read_checkpoint(path, str(path), verified=verified)
    except BadInput as error:
        say(str(error))
        return None


def _find_elsewhere(folder: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Looks for files that are not under their name, and corrects their entries; returns those not found.

    A link may have outlived its checkpoint, and a kill may have come just before a complete file got its name.
    """
    missing = [entry for entry in entries if not (folder / entry.file).is_file()]
    if not missing:
        return []
    present = [entry.file for entry in entries if entry not in missing]
    candidates = [*_links_beside(folder, present), *sorted(path.name for path in folder.glob("checkpoint_*.tmp"))]
    found = {}
    for file in candidates:
        with suppress(OSError):  # a job that saves at this moment renames them
            found[size_and_sum(folder / file)["sha256"]] = file
    for entry in missing:
        entry.file = found.get(entry.sha256, entry.file)
    return [entry for entry in missing if entry.sha256 not in found]


def _links_beside(folder: Path, present: Sequence[str]) -> list[str]:
    """The links that are more than another name of one of these files."""
    paths = [folder / f"{name}.pth" for name in LINKS]
    return [path.name for path in paths if path.is_file() and not any(path.samefile(folder / file) for file in present)]


def _entries_from_files(folder: Path, say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """Rebuilds what a lost manifest knew from the checkpoints themselves: (entries, names of damaged files)."""
    checkpoints = sorted(path.name for path in folder.glob("checkpoint_*.pth") if path.is_file())
    entries: list[Entry] = []
    damaged: list[str] = []
    for file in [*checkpoints, *_links_beside(folder, checkpoints)]:
        state = read_or_say(folder / file, say)
        if state is None:
            damaged.append(file)
        else:
            entry = _entry(state, folder / file)
            if entry.sha256 not in {other.sha256 for other in entries}:
                entries.append(entry)
    if entries:
        say(f"{MANIFEST} had no usable entry: rebuilt from {len(entries)} checkpoint files.")
    return sorted(entries, key=lambda entry: entry.step), damaged


def _entry(state: dict[str, Any], path: Path) -> Entry:
    """What the manifest says of a checkpoint, from nothing but its content."""
    position, best = Position(**state["position"]), state["best"]
    is_best = position.at_epoch_start and best is not None and best["epoch"] == position.epoch
    return Entry(
        path.name,
        **asdict(position),
        step=state["step"],
        value=best["value"] if is_best else None,
        best=is_best,
        **size_and_sum(path),
        source=state["config"].get("--resume-from"),
    )
