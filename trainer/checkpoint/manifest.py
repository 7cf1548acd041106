"""manifest.json: what is known of each checkpoint of a run directory without opening it."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.checkpoint.format import schema_error_of_manifest, with_checksum
from trainer.checkpoint.lock import Writer
from trainer.checkpoint.records import read_json
from trainer.common.files import MOST_WHOLE
from trainer.loading.order import Position

MANIFEST = "manifest.json"


@dataclass
class Entry:
    """One line of the manifest.

    value: the monitored metric, None where there was no validation.
    best: whether it was the best one so far when it was saved.
    source: the `--resume-from` that it descends from, with the whole path.
    """

    file: str
    epoch: int
    phase: int
    samples: int
    step: int
    value: float | None
    best: bool
    bytes: int
    sha256: str
    source: str | None

    @classmethod
    def of(
        cls, state: Mapping[str, Any], file: str, size_and_checksum: Mapping[str, Any], inherited: str | None = None
    ) -> "Entry":
        """The entry of a checkpoint with this state. inherited: its source where its own start names none."""
        position = {name: state["position"][name] for name in ("epoch", "phase", "samples")}
        verdict = {"value": state["value"], "best": state["is_best"]}
        given = state["config"]["--resume-from"]
        source = inherited if given is None else str(Path(given).resolve())
        return cls(file, **position, step=state["step"], **verdict, **size_and_checksum, source=source)

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.phase, self.samples)


def read_manifest(path: Path, say: Callable[[str], None] = lambda line: None) -> list[Entry]:
    """Its entries, oldest first; none where there is no file, or nothing in it can be relied on.

    say: gets a line about a damaged one. Raises DiskError.
    """
    content = read_json(path, say, MOST_WHOLE)
    if not content:
        return []
    schema_error = schema_error_of_manifest(content)
    if schema_error is None:
        return [Entry(**entry) for entry in content["checkpoints"]]
    say(f"{path} is damaged: {schema_error}.")
    return []


def write_manifest(path: Path, entries: Sequence[Entry], writer: Writer) -> None:
    """Replaces the file as a whole, durably. Raises OSError, LockTaken."""
    content = {"checkpoints": [asdict(entry) for entry in entries]}
    writer.replace_text(path, json.dumps(with_checksum(content), indent=2) + "\n")


def best_first(entries: Sequence[Entry], mode: Literal["max", "min"]) -> list[Entry]:
    """Those with a value, after the one that best.pth names; of equal ones the earlier comes first.

    entries: oldest first. mode: which value is best.
    """
    best, sign = newest_best(entries), 1 if mode == "min" else -1
    judged = [e for e in entries if e is best or (e.value is not None and not math.isnan(e.value))]
    return sorted(judged, key=lambda e: (e is not best, sign * (e.value or 0.0)))


def newest_best(entries: Sequence[Entry]) -> Entry | None:
    """The best checkpoint; None if there was no validation yet. entries: oldest first."""
    return next((entry for entry in reversed(entries) if entry.best), None)


def unused_path(folder: Path, position: Position) -> Path:
    """The name for a checkpoint. None is ever overwritten: a run that went back gets another name."""
    name = f"checkpoint_{position.epoch}"
    if not position.at_epoch_start:
        name += f"_{position.phase}_{position.samples}" + (f"_{position.turn}" if position.turn else "")
    suffixes = itertools.chain([""], (f"_again{number}" for number in itertools.count(2)))
    paths = (folder / f"{name}{suffix}.pth" for suffix in suffixes)
    return next(path for path in paths if not path.exists())
