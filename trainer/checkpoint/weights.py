"""The weights of a checkpoint: found in a run that is to be used, and compared with the model that is to take them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.directory import find_checkpoints
from trainer.checkpoint.file import CheckpointReader, read_checkpoint, read_settings
from trainer.checkpoint.manifest import LINKS, MANIFEST, Entry, read_manifest
from trainer.common.errors import UserError, printable
from trainer.common.files import refusing_disk_errors
from trainer.loading.order import Position


@dataclass(frozen=True)
class TrainedRun:
    """The checkpoint of a run. label: what messages call its weights, in the plural. folder: where it lies.

    comes_with_task: it was trained with other flags and data than those of the command line, and is right all the same.
    remarks: what the user should know of the choice of these weights.
    """

    label: str
    state: dict[str, Any]
    folder: Path
    comes_with_task: bool = False
    remarks: tuple[str, ...] = ()


def find_weights(folder: Path, files: Mapping[str, Path | None], say: Callable[[str], None]) -> TrainedRun:
    """The first checkpoint file that is given, by flag; without any the best weights of the run directory.

    Raises UserError.
    """
    for name, path in files.items():
        if path is not None:
            state = read_checkpoint(path, f"{name} {path}", only_weights=True)
            return TrainedRun(f"the weights in {path}", state, path.parent)
    state = load_best_weights(folder, say)
    position = Position(**state["position"])
    moment = f"epoch {position.epoch}" if position.at_epoch_start else f"optimizer step {state['step']}"
    return TrainedRun(f"the weights of {moment} in {folder}", state, folder)


def load_best_weights(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The best intact checkpoint of a run directory; the newest where there was no validation.

    Takes no lock and changes nothing. say: gets a line for whatever is damaged. Raises UserError.
    """
    entries = _entries(folder, say)
    reader = CheckpointReader(folder, say)
    for entry in _best_first(entries):
        state = reader.read(entry)
        if state is not None:
            return state
    runs = [] if entries else runs_within(folder)
    if runs:
        raise UserError(f"--save-dir {folder}: holds several runs; name one, such as --save-dir {runs[0]}")
    raise UserError(f"--save-dir {folder}: holds no intact checkpoint to use; train first")


def runs_within(folder: Path) -> list[Path]:
    """The run directories in a folder of several runs, as `--seeds` and `--folds` make them."""
    return sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{MANIFEST}"))


def find_settings(folder: Path, of_best: bool) -> tuple[str, dict[str, Any]] | None:
    """Settings in the newest checkpoint of a run directory, or in the best; None in a folder without any.

    Takes no lock, changes nothing, and reads no tensors: every process calls it at its start. Of damage others tell.
    """
    with suppress(OSError):
        entries = read_manifest(folder / MANIFEST)
        listed = [folder / entry.file for entry in (_best_first(entries) if of_best else reversed(entries))]
        others = {*folder.glob("checkpoint_*.pth"), *(folder / name for name in LINKS)}.difference(listed)
        present = [path for path in others if path.is_file()]
        present.sort(key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
        found = map(read_settings, [*listed, *present])
        return next((settings for settings in found if settings is not None), None)
    return None


def _best_first(entries: Sequence[Entry]) -> list[Entry]:
    """The order in which checkpoints are tried by who uses a run: the best, then others from the newest on."""
    return sorted(reversed(entries), key=lambda entry: not entry.best)


def holds_run(folder: Path, say: Callable[[str], None]) -> bool:
    """Whether a folder holds a checkpoint, be it damaged. say: see `load_best_weights`. Raises UserError."""
    return bool(_entries(folder, say))


def _entries(folder: Path, say: Callable[[str], None]) -> list[Entry]:
    with refusing_disk_errors(f"--save-dir {folder}", "choose the folder of a run"):
        return find_checkpoints(folder, say)[0]


@dataclass(frozen=True)
class WeightComparison:
    """Weights beside a model that is to take them, buffers among them.

    fitting: those that it can take, by its names. missing: names that it has alone; unknown: names that it does not
    have; unlike: of those with another shape, or a type that torch does not convert, what to say of it by name.
    """

    fitting: dict[str, Tensor]
    missing: list[str]
    unknown: list[str]
    unlike: dict[str, str]

    @property
    def differences(self) -> list[str]:
        missing = [f"{name} is missing" for name in self.missing]
        unknown = [f"{name} is unknown" for name in self.unknown]
        return sorted(map(printable, [*missing, *unknown, *self.unlike.values()]))


def compare(model: nn.Module, weights: Mapping[str, Tensor]) -> WeightComparison:
    """Compares names, shapes and types. A prefix that all names of the weights share need not be one of the model's."""
    own = model.state_dict()
    found = _without_prefix(weights, own)
    unlike = {
        name: told for name, value in found.items() if name in own and (told := _difference(name, value, own[name]))
    }
    return WeightComparison(
        fitting={name: value for name, value in found.items() if name in own and name not in unlike},
        missing=[name for name in own if name not in found],
        unknown=[name for name in found if name not in own],
        unlike=unlike,
    )


def _difference(name: str, value: Tensor, own: Tensor) -> str | None:
    """Why a tensor of the model cannot take a value; None where it can."""
    if own.shape != value.shape:
        return f"{name} has shape {tuple(value.shape)}, not {tuple(own.shape)}"
    if own.dtype == value.dtype:
        return None
    try:
        torch.empty(1, dtype=own.dtype).copy_(torch.empty(1, dtype=value.dtype))
    except RuntimeError:
        return f"{name} is of {value.dtype}, not {own.dtype}"
    return None


def _without_prefix(weights: Mapping[str, Tensor], known: Collection[str]) -> dict[str, Tensor]:
    """The weights by the model's names, where a wrapper has put "module.", "model." or the like before all of them."""
    first = next(iter(weights), "")
    prefixes = ["", *accumulate(f"{part}." for part in first.split(".")[:-1])]
    shared = [prefix for prefix in prefixes if all(name.startswith(prefix) for name in weights)]
    prefix = max(shared, key=lambda prefix: sum(name.removeprefix(prefix) in known for name in weights))
    return {name.removeprefix(prefix): value for name, value in weights.items()}
