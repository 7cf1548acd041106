"""Reads and writes the manifest, which lists a run's checkpoints; evicts old checkpoints and updates links.

This module also reads the other JSON files of a run directory.
"""

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.checkpoint.format import (
    each,
    first_schema_error,
    integer,
    number,
    optional,
    record,
    record_of_fields,
    saved,
    schema_error_of_config,
    text,
    truth,
)
from trainer.checkpoint.lock import Lock
from trainer.common.errors import DiskError
from trainer.common.files import MOST_RECORD, MOST_WHOLE, NO_FILE, flush_path, read_whole, without_nan
from trainer.flags import CheckpointFlags
from trainer.loading.order import Position
from trainer.task import Task

MANIFEST = "manifest.json"
CONFIG = "config.json"
RESULTS = "results.json"
STATE = "state.json"
IF_UNREADABLE = "check the file system and run the same command again, or move the file away to continue without it"
CHECKPOINT_NAME = r"checkpoint_\d+(_\d+_\d+(_\d+)?)?(_again\d+)?\.pth"
LINKS = ("last.pth", "best.pth", "final.pth")

State = Literal["running", "finished", "preempted", "paused", "refused", "failed"]


def read_json(
    path: Path,
    say: Callable[[str], None] = lambda line: None,
    most: int = MOST_RECORD,
    schema_error: Callable[[dict[str, Any]], str | None] = lambda content: None,
) -> dict[str, Any]:
    """Reads a JSON object from a file; {} if the file is missing or damaged. say: prints messages about damage.

    most: size limit in bytes. schema_error: returns the first error of a nonempty object, or None. Raises DiskError if
    an existing file cannot be read.
    """
    try:
        content = json.loads(read_whole(path, most))
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        raise DiskError(f"--save-dir {path.parent}: is a file, or one of its parents is; choose a folder") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in NO_FILE:
            problem = f"--save-dir {path.parent}: cannot read {path.name}: {error.strerror}"
            raise DiskError(f"{problem}; {IF_UNREADABLE}") from None
        content = None
    wrong = (content and schema_error(content)) if isinstance(content, dict) else "it is not a JSON object"
    if not wrong:
        return dict(content)
    say(f"{path} is damaged: {wrong}.")
    return {}


def as_json(content: Any) -> str:
    """Encodes content as JSON text; NaN becomes null."""
    return json.dumps(without_nan(content), indent=2, allow_nan=False) + "\n"


def read_state(folder: Path) -> State | None:
    """Returns the state in a run directory's state.json; None if the file is missing or damaged."""
    state = read_json(folder / STATE).get("state")
    return state if state in get_args(State) else None


def read_config(folder: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Reads a run directory's config.json; {} if the file is missing or invalid."""
    return read_json(folder / CONFIG, say, schema_error=schema_error_of_config)


# --- the manifest ------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """A checkpoint listed in the manifest.

    value: the monitored metric; None without validation. best: whether the value was the best so far when the
    checkpoint was saved. source: absolute path last given to `--resume-from` before this checkpoint was saved.
    """

    file: str = saved(text(CHECKPOINT_NAME))
    epoch: int = saved(integer())
    phase: int = saved(integer())
    samples: int = saved(integer())
    step: int = saved(integer())
    value: float | None = saved(optional(number(finite=False)))
    best: bool = saved(truth)
    bytes: int = saved(integer())
    sha256: str = saved(text("[0-9a-f]{64}"))
    source: str | None = saved(optional(text()))

    @classmethod
    def of(
        cls, state: Mapping[str, Any], file: str, size_and_checksum: Mapping[str, Any], inherited: str | None = None
    ) -> "Entry":
        """Creates the entry of a checkpoint. inherited: its `source` if `--resume-from` is not given."""
        position = {name: state["position"][name] for name in ("epoch", "phase", "samples")}
        verdict = {"value": state["value"], "best": state["is_best"]}
        given = state["config"]["--resume-from"]
        source = inherited if given is None else str(Path(given).resolve())
        return cls(file, **position, step=state["step"], **verdict, **size_and_checksum, source=source)

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.phase, self.samples)


def schema_error_of_manifest(content: Any) -> str | None:
    """Returns the first schema error of a manifest.json; None if it is valid."""
    return first_schema_error([record({"checkpoints": each(record_of_fields(Entry))}), _one_entry_a_file], content)


def _one_entry_a_file(name: str, content: Mapping[str, Any]) -> None:
    """Raises ValueError if two entries name the same file, since evicting one would delete the other's file."""
    files = [entry["file"] for entry in content["checkpoints"]]
    if len(set(files)) < len(files):
        raise ValueError("checkpoints: names a file twice")


def read_manifest(path: Path, say: Callable[[str], None] = lambda line: None) -> list[Entry]:
    """Returns the entries of a manifest, oldest first; [] if the file is missing or invalid.

    Raises DiskError.
    """
    content = read_json(path, say, MOST_WHOLE, schema_error_of_manifest)
    return [Entry(**entry) for entry in content.get("checkpoints", ())]


def write_manifest(path: Path, entries: Sequence[Entry], writer: Lock) -> None:
    """Replaces the manifest atomically and durably. Raises OSError or LockTaken."""
    content = {"checkpoints": [asdict(entry) for entry in entries]}
    writer.replace_text(path, json.dumps(content, indent=2) + "\n")


def best_first(entries: Sequence[Entry], mode: Literal["max", "min"]) -> list[Entry]:
    """Sorts the entries that have a value, best first and ties oldest first; puts the entry of best.pth in front.

    entries: oldest first. mode: whether the largest ("max") or smallest ("min") value is best.
    """
    best, sign = newest_best(entries), 1 if mode == "min" else -1
    judged = [e for e in entries if e is best or (e.value is not None and not math.isnan(e.value))]
    return sorted(judged, key=lambda e: (e is not best, sign * (e.value or 0.0)))


def newest_best(entries: Sequence[Entry]) -> Entry | None:
    """Returns the entry of the best checkpoint; None before the first validation. entries: oldest first."""
    return next((entry for entry in reversed(entries) if entry.best), None)


def unused_path(folder: Path, position: Position) -> Path:
    """Returns an unused path for a checkpoint, so that a run resumed from an earlier checkpoint overwrites no file."""
    name = f"checkpoint_{position.epoch}"
    if not position.at_epoch_start:
        name += f"_{position.phase}_{position.samples}" + (f"_{position.turn}" if position.turn else "")
    suffixes = itertools.chain([""], (f"_again{number}" for number in itertools.count(2)))
    paths = (folder / f"{name}{suffix}.pth" for suffix in suffixes)
    return next(path for path in paths if not path.exists())


# --- links and eviction --------------------------------------------------------------------------------------------


def update_links(folder: Path, entries: Sequence[Entry], is_finished: bool, writer: Lock) -> None:
    """Links last.pth, best.pth and, if the run is finished, final.pth to their checkpoints. Raises OSError."""
    newest = entries[-1] if entries else None
    for name, entry in zip(LINKS, (newest, newest_best(entries), newest if is_finished else None), strict=True):
        if entry is not None:
            link(folder / name, folder / entry.file, writer)


def link(name: Path, file: Path, writer: Lock) -> None:
    """Creates a hard link, or a copy if the file system has no hard links. Raises OSError."""
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
    """How many of the newest (0: all) and of the best checkpoints to keep. mode: "max" if larger values are better."""

    newest: int
    best: int = 1
    mode: Literal["max", "min"] = "max"


def retention_of(flags: CheckpointFlags, task: Task) -> Retention:
    """Returns the `Retention` for a run of this task with these flags."""
    return Retention(flags.keep_checkpoints, flags.keep_best, mode=task.monitor[1])


def evict(
    folder: Path, entries: Sequence[Entry], retention: Retention, is_intact: Callable[[Entry], bool], writer: Lock
) -> list[Entry]:
    """Deletes checkpoints that `retention` does not keep, and returns the remaining entries. entries: oldest first.

    Damaged files do not count as kept, so the last intact checkpoint is never deleted. The manifest lists deleted files
    until the next save; readers ignore entries without a file. Raises OSError or LockTaken.
    """
    if retention.newest == 0:
        return list(entries)
    best = _first_intact(best_first(entries, retention.mode), retention.best, is_intact)
    kept = [*best, *_first_intact(entries[::-1], retention.newest, is_intact)]
    gone = [entry for entry in entries if entry not in kept]
    for entry in gone:
        writer.delete(folder / entry.file)
    if gone:
        flush_path(folder)  # otherwise files could reappear after a power loss
    return [entry for entry in entries if entry in kept]


def _first_intact(entries: Sequence[Entry], num: int, is_intact: Callable[[Entry], bool]) -> list[Entry]:
    """Returns all entries, intact or damaged, up to and including the `num`-th intact entry."""
    found: list[Entry] = []
    for entry in entries:
        if num == 0:
            break
        found.append(entry)
        num -= is_intact(entry)
    return found
