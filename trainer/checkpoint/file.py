"""One checkpoint file: written with its checksum, read without executing anything in it."""

import hashlib
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from trainer.loading.errors import BadInput

RESUMABLE = ("optimizers", "position", "step", "best", "totals", "config", "environment")
"""Entries without which a run cannot go on."""


def read_checkpoint(path: Path, label: str, only_weights: bool = False, verified: bool = False) -> dict[str, Any]:
    """Loads a checkpoint's tensors and plain values; never executes code from it.

    label: what a message calls the file. only_weights: its `model` entry is enough. verified: its sha256 is known and
    right, so that the checksums inside it need no look. Raises BadInput when it is damaged, holds anything else, or
    lacks what is needed.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise BadInput(f"{label}: {error.strerror}") from None
    if not verified:
        _refuse_damaged_archive(path, label)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the version of a pickle that is refused in the next moment
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if any(word in str(error) for word in ("Unsupported global", "Unsupported class", "GLOBAL")):
            raise BadInput(
                f"{label}: refused, it holds more than tensors and plain values; nothing in it was run"
            ) from None
        # What torch says of it advises to load the file without this protection.
        raise BadInput(f"{label}: is damaged, or no checkpoint at all; nothing in it was run") from None
    except Exception as error:  # there is no telling what a reader stumbles over in arbitrary bytes
        raise BadInput(f"{label}: is damaged: {(str(error) or 'it is empty').splitlines()[0]}") from None
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise BadInput(f"{label}: is no checkpoint: it has no entry `model` with the weights")
    missing = [] if only_weights else [name for name in RESUMABLE if name not in state]
    if missing:
        raise BadInput(f"{label}: holds weights, but not the {', '.join(missing)} to go on from; use --init-from")
    return state


def _refuse_damaged_archive(path: Path, label: str) -> None:
    """torch.load does not look at checksums: changed bits would become weights."""
    try:
        if not zipfile.is_zipfile(path):
            return  # nothing that torch writes today; torch.load says what it makes of it
        is_intact = _matches_its_seal(path)
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if is_intact is None else None
    except Exception as error:  # as in `read_checkpoint`
        raise BadInput(f"{label}: is damaged: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    if is_intact is False:
        raise BadInput(f"{label}: is damaged: the checksum at its end does not match")
    if damaged is not None:
        raise BadInput(f"{label}: is damaged: the checksum of its part {damaged} does not match")


# --- the seal ----------------------------------------------------------------------------------------------------
#
# torch.save sums up every part of an archive (CRC32) while it holds the interpreter, which stops training for longer
# than all the rest of a save in the background. So these sums are left out, and the sha256 of everything before it
# stands at the end of the file, as the archive's comment.

SEAL_NAME = b"sha256:"
SEAL_BYTES = len(SEAL_NAME) + 64
COMMENT_LENGTH = struct.pack("<H", SEAL_BYTES)
END_RECORD, END_RECORD_BYTES = b"PK\x05\x06", 22
"""What an archive without a comment ends with; its last two bytes are the length of the comment."""


def _matches_its_seal(path: Path) -> bool | None:
    """Whether a file still is what it was when it was sealed; None if it has no seal."""
    start = len(COMMENT_LENGTH + SEAL_NAME)
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - len(COMMENT_LENGTH) - SEAL_BYTES
        file.seek(max(left, 0))
        comment = file.read()
        if comment[:start] != COMMENT_LENGTH + SEAL_NAME:
            return None
        file.seek(0)
        found = hashlib.sha256()
        while left > 0:
            chunk = file.read(min(left, 2**20))
            found.update(chunk)
            left -= len(chunk)
    return comment[start:] == found.hexdigest().encode()


class _SealedFile:
    """What torch.save needs of a file; sums up what passes through.

    refusal: why the file system took no more, which torch forgets on its way out.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self._end_record = b""
        """The part written last, if it looks like the end; it is held back until that is known."""
        self.size = 0
        self.refusal: OSError | None = None

    def write(self, data: bytes) -> int:
        self._put(self._end_record)
        self._end_record = b""
        if len(data) == END_RECORD_BYTES and bytes(data[:4]) == END_RECORD:
            self._end_record = bytes(data)
        else:
            self._put(data)
        return len(data)

    def seal(self) -> None:
        """Ends the archive with the sum of what it holds."""
        self._put(self._end_record[: -len(COMMENT_LENGTH)])
        self._put(COMMENT_LENGTH + SEAL_NAME + self.sha256.encode())

    def _put(self, data: bytes) -> None:
        self._sum.update(data)
        self.size += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.refusal = error
            raise

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        return self._sum.hexdigest()


@contextmanager
def _without_crc32() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_checkpoint(state: dict[str, Any], path: Path) -> tuple[int, str]:
    """Writes a file and flushes it to disk; returns its size in bytes and its sha256. Raises OSError, RuntimeError."""
    with path.open("wb") as file:
        sealed = _SealedFile(file)
        try:
            with _without_crc32():
                torch.save(state, sealed)  # type: ignore[arg-type]
            sealed.seal()
        except RuntimeError:
            if sealed.refusal is not None:
                raise sealed.refusal from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return sealed.size, sealed.sha256


def size_and_sum(path: Path) -> dict[str, Any]:
    """The "bytes" and "sha256" of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
