"""Writes checkpoint files durably, and verifies and reads them without executing code."""

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
"""Bit in a zip member's `external_attr` that marks a folder."""
MOST_BEYOND = 16 << 20
"""Number of bytes by which loaded tensors may exceed twice their file's size, since they may share memory."""
_UNBOUNDED = (b"bytearray\n", b"_rebuild_device_tensor_from_cpu_tensor\n")
"""Functions, as pickles name them, that torch.load may call with any number of bytes or elements to allocate."""


class NewerFormat(UserError):
    """Raised if a checkpoint has a newer format than this trainer can read."""


def read_checkpoint(path: Path, label: str, only_weights: bool = False, verified: bool = False) -> dict[str, Any]:
    """Loads a checkpoint without executing code, and upgrades it from older formats.

    label: name of the file in messages. only_weights: whether to accept a plain state dict, or a file with only
    the entry `model`. verified: whether the caller has checked the file's sha256. Raises UserError if the file is
    damaged, incomplete or not a checkpoint, NewerFormat if its format is too new, or DiskError if it cannot be read.
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
            f"{label}: has checkpoint format {brief(version)}, but this trainer reads only formats up to "
            f"{FORMAT_VERSION}; use the trainer version that wrote the file, or a newer version"
        )
    if not _are_weights(state.get("model")):
        also = ", and is not a state dict either" if only_weights else ""
        if with_weights := [name for name, value in state.items() if only_weights and _are_weights(value) and value]:
            also += f"; save its entry {brief(with_weights[0])} as a file with torch.save, and give that file"
        raise UserError(f"{label}: is not a checkpoint: it has no entry `model` with weights{also}")
    try:
        state = brought_up_to_date(state)
    except ValueError as error:
        raise UserError(f"{label}: is damaged: {error}") from None
    needed = [name for name, entry in ENTRIES.items() if not (entry.is_optional or only_weights)]
    missing = [name for name in needed if name not in state]
    if missing:
        raise UserError(f"{label}: contains weights, but not {', '.join(missing)}; load the weights with --init-from")
    is_of_run = "task" in state and "config" in state  # callers rely on both entries
    if not only_weights or is_of_run:
        wrong = schema_error_of_checkpoint(state, resumable=not only_weights)
    else:
        wrong = first_schema_error([WEIGHTS], state["model"])
    if wrong is not None:
        raise UserError(f"{label}: is damaged: {wrong}")
    return state


def _load(path: Path, label: str, verified: bool) -> Any:
    """Raises UserError if the file is damaged, or OSError if it cannot be read."""
    with opened(path) as file:
        try:
            _refuse_odd_archive(file)
            if not verified:
                _refuse_changed_bits(path, file)
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged files cause warnings about pickle versions
                state = torch.load(file, map_location="cpu", weights_only=True)
            _refuse_more_than_its_file(state, path.stat().st_size)
        except Exception as error:  # arbitrary bytes can raise anything in a reader
            if path.suffix == ".safetensors":
                raise UserError(f"{label}: torch cannot load it; convert it with safetensors and torch.save") from None
            raise UserError(f"{label}: {_refusal_of(error)}") from None
    return state


def _refusal_of(error: Exception) -> str:
    """Explains why a file could not be read, without torch's advice to load it with `weights_only=False`."""
    text, damaged = str(error), "is damaged or not a checkpoint"
    if isinstance(error, pickle.UnpicklingError):
        is_code = any(word in text for word in ("Unsupported global", "Unsupported class", "GLOBAL"))
        refused = "refused, because it contains more than tensors and plain values"
        return f"{refused if is_code else damaged}; no code in the file was run"
    if "weights_only" in text or "TorchScript" in text:
        return (
            "refused, because a TorchScript archive or a file of torch before 1.6 cannot be read without running its "
            "code; no code was run; save the model's state_dict() with torch.save"
        )
    if isinstance(error, MemoryError):
        return "needs more memory than there is, or is damaged"
    if isinstance(error, AssertionError | LookupError) or not text:  # from torch's reader, for other kinds of files
        return damaged
    return f"is damaged: {text.splitlines()[0].split('. ')[0]}"


def _refuse_more_than_its_file(state: Any, num_bytes: int) -> None:
    """Raises ValueError if a loaded state has more objects or tensor bytes than its file's size allows.

    A small file could otherwise exhaust memory: tensors can have strides of 0, and lists can contain each other.
    """
    waiting: list[Any] = [state]
    seen: set[Any] = set()
    num_parts, num_beyond = num_bytes, 2 * num_bytes + MOST_BEYOND
    while waiting:
        value = waiting.pop()
        num_parts -= 1
        if isinstance(value, Tensor):
            if any(hasattr(Tensor, name) for name in vars(value)):
                raise ValueError("an attribute of one of its tensors would replace a method of torch.Tensor")
            for part in _dense_parts(value):
                view = (part.untyped_storage().data_ptr(), part.storage_offset(), part.shape, part.stride())
                num_beyond -= 0 if view in seen else part.nbytes
                seen.add(view)
        elif isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, str | bytes):
            num_beyond -= 0 if id(value) in seen else len(value)
            seen.add(id(value))
        if num_parts < 0 or num_beyond < 0:
            raise ValueError("it needs far more memory than its size implies, perhaps because a tensor is expanded")


def _dense_parts(value: Tensor) -> list[Tensor]:
    """Returns the dense tensors that make up a tensor; [] for layouts that `format.tensor` rejects."""
    if value.is_meta or value.is_nested:
        return []
    if value.layout == torch.sparse_coo:
        return sparse_parts(value)
    return [value] if value.layout == torch.strided else []


def read_settings(path: Path) -> tuple[str, dict[str, Any]] | None:
    """Returns a checkpoint's `--task` and flags without loading tensors; None if they cannot be read.

    Does not verify checksums, unlike `read_checkpoint`.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            _refuse_odd_archive(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        task, config = state["task"], state["config"]
    except Exception:  # arbitrary bytes can raise anything in a reader
        return None
    is_sound = isinstance(task, str) and isinstance(config, dict) and all(isinstance(name, str) for name in config)
    return (task, config) if is_sound else None


def _are_weights(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(weight, torch.Tensor) for name, weight in value.items()
    )


def _refuse_changed_bits(path: Path, file: IO[bytes]) -> None:
    """Verifies a file's sha256 if the manifest lists it, and the CRC32 of each archive member.

    torch.load checks neither checksum. Raises zipfile.BadZipFile for a wrong checksum.
    """
    known = {}
    with suppress(DiskError):
        known = {entry.file: entry.sha256 for entry in read_manifest(path.parent / MANIFEST)}
    if path.name in known and size_and_sum(path)["sha256"] != known[path.name]:
        raise zipfile.BadZipFile(f"its sha256 is not the one in {path.parent / MANIFEST}")
    if not zipfile.is_zipfile(file):
        return  # torch.load reads or rejects files that are not zip archives
    with zipfile.ZipFile(file) as archive:
        has_checksums = any(part.CRC for part in archive.infolist())  # torch can be configured to omit them
        damaged = archive.testzip() if has_checksums else None
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of its entry {damaged} does not match")


def _refuse_odd_archive(file: IO[bytes]) -> None:
    """Raises zipfile.BadZipFile for archives that torch.save never writes, UnpicklingError for `_UNBOUNDED`."""
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        file.seek(0)
        # torch would read this file as its old format, even if it ends like an archive
        _refuse_unbounded(file.read(MOST_BEYOND))
        if not zipfile.is_zipfile(file):
            return
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        for part in parts:
            if part.filename.lower().endswith("data.pkl"):  # torch ignores case
                part.CRC = None  # type: ignore[assignment]  # torch can be configured to omit checksums
                _refuse_unbounded(archive.read(part))
    if min((part.header_offset for part in parts), default=0) > 0:  # torch may read another list of entries
        raise zipfile.BadZipFile("it has bytes in front of its first entry")
    if any(part.filename.endswith("/constants.pkl") for part in parts):
        raise zipfile.BadZipFile("it is a TorchScript archive")
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise zipfile.BadZipFile("one of its entries is compressed and could unpack to any size")
    if any(part.external_attr & FOLDER_ATTRIBUTE for part in parts):
        raise zipfile.BadZipFile("one of its entries is marked as a folder")  # torch would read it as empty


def _refuse_unbounded(pickled: bytes) -> None:
    for name in _UNBOUNDED:
        if name in pickled:
            raise pickle.UnpicklingError(f"GLOBAL {name.decode()}")


def write_checkpoint(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Writes a checkpoint in the current format and flushes it to disk; returns its size and digest.

    Raises OSError or RuntimeError if writing fails, and UserError before writing if the state cannot be loaded again.
    """
    state = {**state, "format_version": FORMAT_VERSION}
    wrong = error_of_saving(state)
    if wrong is not None:
        raise UnfitState(f"{path.parent}: nothing was saved, because the new file could not be read back: {wrong}")
    # Given a path instead of a file, torch.save holds the GIL while it writes, which would block training.
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]  # it calls only write and flush
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # the file system's error, which torch's message omits
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": hashed.sum.hexdigest()}


class _HashedFile:
    """File wrapper that computes the sha256 of the written content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def size_and_sum(path: Path) -> dict[str, Any]:
    """Returns a file's size and digest: {"bytes": int, "sha256": str}. Raises OSError."""

    def read() -> dict[str, Any]:
        with path.open("rb") as file:
            return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    return read_again(read)


# --- whether a state can be read again, checked before writing ---------------------------------------------------


def error_of_saving(state: Mapping[str, Any], resumable: bool = True) -> str | None:
    """Returns a message that names the invalid entry if a saved state could not be loaded again; otherwise None.

    resumable: whether to require all entries of a checkpoint; otherwise, only the entries in `state` are checked.

    Saves and loads a copy of the state with empty tensors, then validates its entries.
    """
    return _unreadable(state) or schema_error_of_checkpoint(state, resumable)


def error_of_model(weights: Mapping[str, Any]) -> str | None:
    """Returns why a state dict, once saved, could not be loaded; None if it could."""
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
            break  # a key, or the container itself, cannot be read
        name, value = name + refused, parts[refused]
    kind = type(value)
    whose = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name.lstrip('.')} {brief(value)}: is of type {whose}, which checkpoints do not support"


def meta_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a state; replaces strided tensors with tensors of shape (0,), except meta, nested and quantized ones."""
    empty: dict[torch.dtype, Tensor] = {}

    def outlined(value: Tensor) -> Tensor:
        is_ordinary = type(value) in (Tensor, torch.nn.Parameter) or hasattr(value, "to_local")  # a DTensor
        if not is_ordinary or value.is_meta or value.is_nested or value.is_quantized or value.layout != torch.strided:
            return value
        return empty.setdefault(value.dtype, torch.empty(0, dtype=value.dtype))

    outline: dict[str, Any] = map_tensors(state, outlined)
    return outline


def _comes_back(value: Any) -> bool:
    file = BytesIO()
    try:
        torch.save(value, file)
        _refuse_odd_archive(file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # a class may raise anything when pickled
        return False
    return True


# --- the files of one folder -------------------------------------------------------------------------------------


class CheckpointReader:
    """Reads checkpoints of a folder and compares their checksums with the manifest.

    say: prints messages about damaged files. A file whose checksum matched is not hashed again until it changes.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._verified: dict[str, tuple[str, int, int]] = {}
        """Maps a file name to the file's `stamp` when the checksum last matched."""

    def read(self, entry: Entry) -> dict[str, Any] | None:
        """Returns a checkpoint; None if it is damaged. Raises NewerFormat, or DiskError if the file cannot be read."""
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
        """Returns whether a checkpoint can be read and matches its checksum."""
        try:
            return self._damage(entry) is None
        except OSError:
            return False

    def trust(self, entry: Entry) -> None:
        """Records that the file, as it is now, matches the entry's checksum."""
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
