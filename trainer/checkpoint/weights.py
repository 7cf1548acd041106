"""The weights of a checkpoint: found in a run that is to be used, and compared with the model that is to take them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trainer.checkpoint.file import CheckpointReader, read_checkpoint
from trainer.checkpoint.recovery import find_checkpoints
from trainer.loading.errors import BadInput
from trainer.loading.files import refusing_disk_errors


@dataclass(frozen=True)
class TrainedRun:
    """The checkpoint of a run. label: what messages call its weights, in the plural."""

    label: str
    state: dict[str, Any]


def find_weights(folder: Path, files: Mapping[str, Path | None], say: Callable[[str], None]) -> TrainedRun:
    """The first checkpoint file that is given, by flag; without any the best weights of the run directory.

    Raises BadInput.
    """
    for name, path in files.items():
        if path is not None:
            return TrainedRun(f"the weights in {path}", read_checkpoint(path, f"{name} {path}", only_weights=True))
    state = load_best_weights(folder, say)
    return TrainedRun(f"the weights of epoch {state['position']['epoch']} in {folder}", state)


def load_best_weights(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The best intact checkpoint of a run directory; the newest where there was no validation.

    Takes no lock and changes nothing. say: gets a line for whatever is damaged. Raises BadInput.
    """
    with refusing_disk_errors(f"--save-dir {folder}", "choose the folder of a run"):
        entries, _ = find_checkpoints(folder, say)
    reader = CheckpointReader(folder, say)
    for entry in sorted(reversed(entries), key=lambda entry: not entry.best):
        state = reader.read(entry)
        if state is not None:
            return state
    raise BadInput(f"--save-dir {folder}: holds no intact checkpoint to use; train first")


def load_weights(model: nn.Module, state: Mapping[str, Any], source: str, hint: str) -> None:
    """Gives a model the weights of a checkpoint. Raises BadInput when they are of another one."""
    check_weights_fit(model, state, source, hint)
    model.load_state_dict(state["model"])


def check_weights_fit(model: nn.Module, state: Mapping[str, Any], source: str, hint: str) -> None:
    """Raises BadInput when a checkpoint's weights are of another model.

    source: what the message calls the checkpoint. hint: what to do about it.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state["model"].items()}
    differences = [f"{name} is missing" for name in expected.keys() - found.keys()]
    differences += [f"{name} is unknown" for name in found.keys() - expected.keys()]
    differences += [
        f"{name} has shape {found[name]}, not {expected[name]}"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise BadInput(f"{source} is of another model: {shown}{more}; {hint}")
