"""manifest.json: what is known of each checkpoint of a run directory without opening it."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.loading.files import replace_text
from trainer.loading.order import Position

MANIFEST = "manifest.json"
CHECKPOINT_NAME = re.compile(r"checkpoint_\d+(_\d+_\d+)?(_again\d+)?\.pth")


@dataclass
class Entry:
    """One line of the manifest.

    value: the monitored metric, None where there was no validation.
    best: whether it was the best one so far when it was saved.
    source: the `--resume-from` of the run that saved it.
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
        cls, state: Mapping[str, Any], file: str, value: float | None, best: bool, size_and_checksum: Mapping[str, Any]
    ) -> "Entry":
        """The entry of a checkpoint with this state."""
        position = {name: state["position"][name] for name in ("epoch", "phase", "samples")}
        source = state["config"].get("--resume-from")
        return cls(file, **position, step=state["step"], value=value, best=best, **size_and_checksum, source=source)


def read_manifest(path: Path, say: Callable[[str], None] = lambda line: None) -> list[Entry]:
    """Its entries, oldest first; none where there is no file, or nothing in it can be relied on.

    say: gets a line about a damaged one. Raises OSError.
    """
    try:
        entries = [Entry(**entry) for entry in json.loads(path.read_bytes())["checkpoints"]]
        if all(map(_is_plausible, entries)) and len({entry.file for entry in entries}) == len(entries):
            return entries
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    say(f"{path} is damaged.")
    return []


def write_manifest(path: Path, entries: Sequence[Entry]) -> None:
    """Replaces the file as a whole, durably. Raises OSError."""
    content = {"checkpoints": [asdict(entry) for entry in entries]}
    replace_text(path, json.dumps(content, indent=2) + "\n")


def newest_best(entries: Sequence[Entry]) -> Entry | None:
    """The best checkpoint; None if there was no validation yet. entries: oldest first."""
    return next((entry for entry in reversed(entries) if entry.best), None)


def is_best_of_its_own(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds the weights of the best score that it knows of."""
    best = state["best"]
    if best is None:
        return False
    if best.get("step") is None:  # of an older checkpoint: at an epoch's end
        return Position(**state["position"]).is_end_of(best["epoch"])
    return bool(best["step"] == state["step"])


def unused_path(folder: Path, position: Position) -> Path:
    """The name for a checkpoint. None is ever overwritten: a run that went back gets another name."""
    name = f"checkpoint_{position.epoch}"
    if not position.at_epoch_start:
        name += f"_{position.phase}_{position.samples}"
    suffixes = itertools.chain([""], (f"_again{number}" for number in itertools.count(2)))
    paths = (folder / f"{name}{suffix}.pth" for suffix in suffixes)
    return next(path for path in paths if not path.exists())


def _is_plausible(entry: Entry) -> bool:
    """Whether every value is what `write_manifest` would write; a file must be one of the directory itself.

    Raises TypeError where a text is something else.
    """
    counts: list[Any] = [entry.epoch, entry.phase, entry.samples, entry.step, entry.bytes]
    return (
        CHECKPOINT_NAME.fullmatch(entry.file) is not None
        and all(type(count) is int and count >= 0 for count in counts)
        and (entry.value is None or type(entry.value) in (int, float))
        and isinstance(entry.best, bool)
        and re.fullmatch("[0-9a-f]{64}", entry.sha256) is not None
        and (entry.source is None or isinstance(entry.source, str))
    )
