"""Checkpoint files: written durably, read as far as they are intact, without executing anything in them."""

import hashlib
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from trainer.checkpoint.format import (
    ENTRIES,
    FORMAT_VERSION,
    WEIGHTS,
    brief,
    brought_up_to_date,
    by_name,
    dense_tensor,
    first_schema_error,
    schema_error_of_checkpoint,
)
from trainer.checkpoint.manifest import IF_UNREADABLE, MANIFEST, Entry, read_manifest
from trainer.common.errors import DiskError, UnfitState, UserError
from trainer.common.files import opened, read_again, refusing_disk_errors, require_regular, stamp
from trainer.common.tensors import map_tensors
from trainer.common.torch_private import sparse_parts

FOLDER_ATTRIBUTE = 0x10
"""Of a part of an archive, in its `external_attr`."""
MOST_BEYOND = 16 << 20
"""Bytes by which tensors may exceed their file, as views of the same memory do."""


class NewerFormat(UserError):
    """A checkpoint is of a later format than this trainer reads."""


def read_checkpoint(path: Path, label: str, only_weights: bool = False, verified: bool = False) -> dict[str, Any]:
    """Loads a checkpoint's tensors and plain values, of this format or an older one; never executes code from it.

    label: what a message calls the file. only_weights: its `model` entry is enough, or a state dict that would be that
    entry. verified: its sha256 is known and right, so that those of its parts need no look. Raises UserError when it is
    damaged, holds anything else, lacks what is needed, or has an entry that no run writes; NewerFormat; DiskError when
    it cannot be read.
    """
    with refusing_disk_errors(label):
        require_regular(path)
        state = read_again(partial(_load, path, label, verified))
    if only_weights and _are_weights(state):
        state = {"model": state}
    if not isinstance(state, dict):
        state = {}
    version = state.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise NewerFormat(
            f"{label}: is of checkpoint format {brief(version)}, and this trainer reads formats up to "
            f"{FORMAT_VERSION}; use the version of the trainer that wrote it, or a newer one"
        )
    if not _are_weights(state.get("model")):
        also = ", and is no state dict either" if only_weights else ""
        raise UserError(f"{label}: is no checkpoint: it has no entry `model` with the weights{also}")
    try:
        state = brought_up_to_date(state)
    except ValueError as error:
        raise UserError(f"{label}: is damaged: {error}") from None
    needed = [name for name, entry in ENTRIES.items() if not (entry.is_optional or only_weights)]
    missing = [name for name in needed if name not in state]
    if missing:
        raise UserError(f"{label}: holds weights, but not the {', '.join(missing)} to go on from; use --init-from")
    is_of_run = "task" in state and "config" in state  # which then is relied on
    if not only_weights or is_of_run:
        wrong = schema_error_of_checkpoint(state, resumable=not only_weights)
    else:
        wrong = first_schema_error([WEIGHTS], state["model"])
    if wrong is not None:
        raise UserError(f"{label}: is damaged: {wrong}")
    return state


def _load(path: Path, label: str, verified: bool) -> Any:
    """Content of a file. Raises UserError for a damaged one, OSError when it cannot be read."""
    with opened(path) as file:
        try:
            _refuse_odd_archive(file)
            if not verified:
                _refuse_changed_bits(path, file)
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the version of a pickle that is refused in the next moment
                state = torch.load(file, map_location="cpu", weights_only=True)
            _refuse_more_than_its_file(state, path.stat().st_size)
        except Exception as error:  # there is no telling what a reader stumbles over in arbitrary bytes
            raise UserError(f"{label}: {_refusal_of(error)}") from None
    return state


def _refusal_of(error: Exception) -> str:
    """Why a file could not be read, without torch's advice to read it without this protection."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        is_code = any(word in text for word in ("Unsupported global", "Unsupported class", "GLOBAL"))
        refused, damaged = "refused, it holds more than tensors and plain values", "is damaged, or no checkpoint at all"
        return f"{refused if is_code else damaged}; nothing in it was run"
    if "weights_only" in text or "TorchScript" in text:
        return (
            "refused, it is an archive of TorchScript or of torch before 1.6, not to be read without running what it "
            "holds; nothing in it was run; save the model's state_dict() by torch.save"
        )
    return f"is damaged: {(text or 'it is empty').splitlines()[0]}"


def _refuse_more_than_its_file(state: Any, num_bytes: int) -> None:
    """Raises ValueError where what was read has more parts or numbers than its file has bytes.

    Tensors may repeat what they hold without end, by strides of 0, and lists may name each other.
    """
    waiting: list[Any] = [state]
    seen: set[Any] = set()
    num_parts, num_beyond = num_bytes, 2 * num_bytes + MOST_BEYOND
    while waiting:
        value = waiting.pop()
        num_parts -= 1
        if isinstance(value, Tensor):
            if any(hasattr(Tensor, name) for name in vars(value)):
                raise ValueError("a tensor in it brings methods of its own")
            for part in _dense_parts(value):
                view = (part.untyped_storage().data_ptr(), part.storage_offset(), part.shape, part.stride())
                num_beyond -= 0 if view in seen else part.nbytes
                seen.add(view)
        elif isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, str | bytes | bytearray):
            num_beyond -= 0 if id(value) in seen else len(value)
            seen.add(id(value))
        if num_parts < 0 or num_beyond < 0:
            raise ValueError("it holds more than its file has bytes, such as a tensor that repeats one value")


def _dense_parts(value: Tensor) -> list[Tensor]:
    """Tensors in memory that make up a tensor; none of kinds that `trainer.checkpoint.format.tensor` refuses."""
    if value.is_meta or value.is_nested:
        return []
    if value.layout == torch.sparse_coo:
        return sparse_parts(value)
    return [value] if value.layout == torch.strided else []


def read_settings(path: Path) -> tuple[str, dict[str, Any]] | None:
    """The `--task` and all flags of the run that a checkpoint is of, without its tensors; None where it tells none.

    Verifies nothing: who uses the checkpoint reads it by `read_checkpoint` too.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            _refuse_odd_archive(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        task, config = state["task"], state["config"]
    except Exception:  # there is no telling what a reader stumbles over in arbitrary bytes
        return None
    is_sound = isinstance(task, str) and isinstance(config, dict) and all(isinstance(name, str) for name in config)
    return (task, config) if is_sound else None


def _are_weights(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(weight, torch.Tensor) for name, weight in value.items()
    )


def _refuse_changed_bits(path: Path, file: IO[bytes]) -> None:
    """By the sha256 that the manifest beside it may know, and by the CRC32 of each part of the archive.

    torch.load does not look at these. Raises whatever zipfile raises.
    """
    known = {}
    with suppress(DiskError):
        known = {entry.file: entry.sha256 for entry in read_manifest(path.parent / MANIFEST)}
    if path.name in known and size_and_sum(path)["sha256"] != known[path.name]:
        raise zipfile.BadZipFile(f"its sha256 is not the one in {path.parent / MANIFEST}")
    if not zipfile.is_zipfile(file):
        return  # nothing that torch writes today; torch.load says what it makes of it
    with zipfile.ZipFile(file) as archive:
        has_checksums = any(part.CRC for part in archive.infolist())  # torch can be told to leave them out
        damaged = archive.testzip() if has_checksums else None
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of its part {damaged} does not match")


def _refuse_odd_archive(file: IO[bytes]) -> None:
    """What torch never writes, whatever the checksums say, which came with it. Raises whatever zipfile raises."""
    if not zipfile.is_zipfile(file):
        return  # torch.load says what it makes of it
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
    if any(part.filename.endswith("/constants.pkl") for part in parts):
        raise zipfile.BadZipFile("it is an archive of TorchScript")
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise zipfile.BadZipFile("a part of it is compressed, which might unpack to anything")
    if any(part.external_attr & FOLDER_ATTRIBUTE for part in parts):
        raise zipfile.BadZipFile("a part of it is marked as a folder")  # torch would take it for an empty one


def write_checkpoint(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Writes a file of today's format, and flushes it to disk; returns its `size_and_sum`.

    Raises OSError, RuntimeError; UserError, and writes nothing, for a state that would be refused when it is read.
    """
    state = {**state, "format_version": FORMAT_VERSION}
    wrong = error_of_saving(state)
    if wrong is not None:
        raise UnfitState(f"{path.parent}: nothing is saved, for it could not be read again: {wrong}")
    # Given a path instead of a file, torch writes with the interpreter held, and stops training.
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]  # it asks for no more than these methods
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # what the file system said, and torch does not repeat
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": hashed.sum.hexdigest()}


class _HashedFile:
    """A file that is written from its beginning to its end, and summed up on the way, which spares reading it again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def size_and_sum(path: Path) -> dict[str, Any]:
    """The "bytes" and "sha256" of a file. Raises OSError."""

    def read() -> dict[str, Any]:
        with path.open("rb") as file:
            return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    return read_again(read)


# --- whether a state can be read again once it is written; asked before anything is -----------------------------


def error_of_saving(state: Mapping[str, Any], resumable: bool = True) -> str | None:
    """Why a state would be refused when it is read again, by the name of an entry; None for nothing.

    resumable: it is to have all entries; otherwise those that are there count.

    The reader itself says it, of the state without the content of its tensors, and then `schema_error_of_checkpoint`.
    """
    return _unreadable(state) or schema_error_of_checkpoint(state, resumable)


def error_of_model(weights: Mapping[str, Any]) -> str | None:
    """Why the state dict of a model would be refused when it is read again, or None. weights: values of any kind."""
    return _unreadable(weights) or first_schema_error([by_name(dense_tensor)], weights)


def _unreadable(state: Mapping[str, Any]) -> str | None:
    name = ""
    value: Any = meta_state_of(state)
    if _comes_back(value):
        return None
    while isinstance(value, dict | list | tuple):
        named = {f".{key}": item for key, item in value.items()} if isinstance(value, dict) else {}
        parts = named or {f"[{index}]": item for index, item in enumerate(value)}
        refused = next((part for part, item in parts.items() if not _comes_back(item)), None)
        if refused is None:
            break  # it is a name in a mapping, or the container itself
        name, value = name + refused, parts[refused]
    kind = type(value)
    whose = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name.lstrip('.')} {brief(value)}: is of type {whose}, which no file brings back"


def meta_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with an empty tensor in the place of each that is an ordinary one, on whatever device."""
    empty: dict[torch.dtype, Tensor] = {}

    def outlined(value: Tensor) -> Tensor:
        is_ordinary = type(value) in (Tensor, torch.nn.Parameter) or hasattr(value, "to_local")  # or a part of one
        if not is_ordinary or value.is_meta or value.is_nested or value.is_quantized or value.layout != torch.strided:
            return value
        return empty.setdefault(value.dtype, torch.empty(0, dtype=value.dtype))

    outline: dict[str, Any] = map_tensors(state, outlined)
    return outline


def _comes_back(value: Any) -> bool:
    file = BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever a class does that is asked to be stored
        return False
    return True


# --- the files of one folder -------------------------------------------------------------------------------------


class CheckpointReader:
    """Reads the checkpoints of one folder as far as they are what its manifest says.

    say: gets a line for whatever is damaged. The checksum of a file is not worked out again while it does not change.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._verified: dict[str, tuple[str, int, int]] = {}
        """File -> its stamp when it last matched its checksum."""

    def read(self, entry: Entry) -> dict[str, Any] | None:
        """The checkpoint, or None when it is damaged. Raises NewerFormat, and DiskError when it cannot be read."""
        path = self._folder / entry.file
        try:
            with refusing_disk_errors(f"--save-dir {self._folder}: cannot read {entry.file}", IF_UNREADABLE):
                wrong = self._damage(entry)
            if wrong is None:
                return read_checkpoint(path, str(path), verified=True)
            self._say(f"{path} is damaged: {wrong}.")
        except (NewerFormat, DiskError):
            raise
        except UserError as error:
            self._say(str(error))
        return None

    def is_intact(self, entry: Entry) -> bool:
        """Whether it is one that can be read: others count as damaged where nothing depends on it."""
        try:
            return self._damage(entry) is None
        except OSError:
            return False

    def trust(self, entry: Entry) -> None:
        """Takes note that a file was just written with this checksum."""
        self._verified[entry.file] = stamp(self._folder / entry.file)

    def _damage(self, entry: Entry) -> str | None:
        path = self._folder / entry.file
        try:
            if self._verified.get(entry.file) != stamp(path):
                if size_and_sum(path)["sha256"] != entry.sha256:
                    return f"its sha256 is not the one in {MANIFEST}"
                self.trust(entry)
        except FileNotFoundError as error:
            return error.strerror
        return None
