"""One checkpoint file: written with its checksum, read without executing anything in it."""

import hashlib
import os
import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch

from data.errors import BadInput

RESUMABLE = ("optimizers", "position", "step", "best", "totals", "config", "environment")
"""Entries without which a run cannot go on."""


def read_checkpoint(path: Path, label: str, only_weights: bool = False) -> dict[str, Any]:
    """Loads a checkpoint's tensors and plain values; never executes code from it.

    label: what a message calls the file. only_weights: its `model` entry is enough. Raises BadInput when it is
    damaged, holds anything else, or lacks what is needed.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise BadInput(f"{label}: {error.strerror}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the version of a pickle that is refused in the next moment
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if any(word in str(error) for word in ("Unsupported global", "Unsupported class", "GLOBAL")):
            raise BadInput(
                f"{label}: refused, it holds more than tensors and plain values; nothing in it was run"
            ) from None
        raise BadInput(f"{label}: is damaged: {str(error).splitlines()[0]}") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise BadInput(f"{label}: is damaged: {(str(error) or 'it is empty').splitlines()[0]}") from None
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise BadInput(f"{label}: is no checkpoint: it has no entry `model` with the weights")
    missing = [] if only_weights else [name for name in RESUMABLE if name not in state]
    if missing:
        raise BadInput(f"{label}: holds weights, but not the {', '.join(missing)} to go on from; use --init-from")
    return state


class _ChecksummedFile:
    """What torch.save needs of a file; sums up what passes through."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        return self._sum.hexdigest()


def write_checkpoint(state: dict[str, Any], path: Path) -> tuple[int, str]:
    """Writes a file and flushes it to disk; returns its size in bytes and its sha256."""
    with path.open("wb") as file:
        summed = _ChecksummedFile(file)
        torch.save(state, summed)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return summed.size, summed.sha256


def size_and_sum(path: Path) -> dict[str, Any]:
    """The "bytes" and "sha256" of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
