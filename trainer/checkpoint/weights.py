"""The checkpoint of a run that is to be used, not trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.manifest import refuse_altered


@dataclass(frozen=True)
class TrainedRun:
    """The checkpoint of a run. label: what messages call its weights, in the plural."""

    label: str
    state: dict[str, Any]


def find_weights(directory: RunDirectory, files: Mapping[str, Path | None]) -> TrainedRun:
    """The first checkpoint file that is given, by flag; without any the best weights of the directory.

    Changes nothing. Raises BadInput.
    """
    for name, path in files.items():
        if path is not None:
            refuse_altered(path, f"{name} {path}")
            return TrainedRun(f"the weights in {path}", read_checkpoint(path, f"{name} {path}", only_weights=True))
    directory.look()
    state = directory.load_for_use()
    return TrainedRun(f"the weights of epoch {state['position']['epoch']} in {directory.path}", state)
