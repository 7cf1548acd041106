"""Finds a run's weights, and compares loaded weights with a model's parameters and buffers."""

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
    """Loaded checkpoint of a run. label: plural noun for the weights in messages.

    comes_with_task: whether `Task.shipped_weights` names the weights; `--eval-only` then accepts other data.
    remarks: sentences for the user about the choice of weights.
    """

    label: str
    state: dict[str, Any]
    folder: Path
    comes_with_task: bool = False
    remarks: tuple[str, ...] = ()


def find_weights(folder: Path, files: Mapping[str, Path | None], say: Callable[[str], None]) -> TrainedRun:
    """Loads the first of `files` (paths by flag) that is not None; otherwise the best weights of the run in `folder`.

    Raises UserError if the file or run has no intact weights.
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
    """Loads the best intact checkpoint of a run directory, or the newest checkpoint of a run without validation.

    Takes no lock and changes no file. say: prints messages about damage. Raises UserError if no checkpoint is intact.
    """
    entries = _entries(folder, say)
    reader = CheckpointReader(folder, say)
    for entry in _best_first(entries):
        state = reader.read(entry)
        if state is not None:
            return state
    runs = [] if entries else runs_within(folder)
    if runs:
        raise UserError(f"--save-dir {folder}: contains several runs; choose one, for example --save-dir {runs[0]}")
    raise UserError(f"--save-dir {folder}: contains no intact checkpoint to use; train first")


def runs_within(folder: Path) -> list[Path]:
    """Lists the run directories in a folder, such as one made by `--seeds` or `--folds`."""
    return sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{MANIFEST}"))


def find_settings(folder: Path, of_best: bool) -> tuple[str, dict[str, Any]] | None:
    """Reads `--task` and flags from a run directory's newest or best checkpoint; None without a readable checkpoint.

    Takes no lock, changes no file and reads no tensors, since every process calls it.
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
    """Lists the checkpoints that were the best when saved, newest first, and then the others, newest first."""
    return sorted(reversed(entries), key=lambda entry: not entry.best)


def holds_run(folder: Path, say: Callable[[str], None]) -> bool:
    """Returns whether a folder contains a checkpoint, intact or damaged. say: prints messages about damage."""
    return bool(_entries(folder, say))


def _entries(folder: Path, say: Callable[[str], None]) -> list[Entry]:
    with refusing_disk_errors(f"--save-dir {folder}", "choose the folder of a run"):
        return find_checkpoints(folder, say)[0]


@dataclass(frozen=True)
class WeightComparison:
    """Comparison of a file's weights with a model's parameters and buffers.

    fitting: weights that the model can load, by the model's names. missing: names only in the model. unknown: names
    only in the weights. unlike: messages by name about weights of another shape, or of a dtype that torch cannot
    convert.
    """

    fitting: dict[str, Tensor]
    missing: list[str]
    unknown: list[str]
    unlike: dict[str, str]

    @property
    def differences(self) -> list[str]:
        missing = [f"{name} is only in the model" for name in self.missing]
        unknown = [f"{name} is only in the file" for name in self.unknown]
        return sorted(map(printable, [*missing, *unknown, *self.unlike.values()]))


def compare(model: nn.Module, weights: Mapping[str, Tensor]) -> WeightComparison:
    """Compares weights with a model's state dict by name, shape and dtype; ignores a prefix that all weights share."""
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
    """Returns a message if a model's tensor cannot be set to `value`; otherwise None."""
    if own.shape != value.shape:
        return f"{name} has shape {tuple(value.shape)} in the file and {tuple(own.shape)} in the model"
    if own.dtype == value.dtype:
        return None
    try:
        torch.empty(1, dtype=own.dtype).copy_(torch.empty(1, dtype=value.dtype))
    except RuntimeError:
        return f"{name} has type {value.dtype} in the file and {own.dtype} in the model"
    return None


def _without_prefix(weights: Mapping[str, Tensor], known: Collection[str]) -> dict[str, Tensor]:
    """Removes a prefix common to all names, such as "module." or "model.", that a wrapper module added."""
    first = next(iter(weights), "")
    prefixes = ["", *accumulate(f"{part}." for part in first.split(".")[:-1])]
    shared = [prefix for prefix in prefixes if all(name.startswith(prefix) for name in weights)]
    prefix = max(shared, key=lambda prefix: sum(name.removeprefix(prefix) in known for name in weights))
    return {name.removeprefix(prefix): value for name, value in weights.items()}
