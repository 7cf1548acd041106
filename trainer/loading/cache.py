"""Caches arrays on disk, memory-mapped and shared by all processes of a machine."""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from trainer.common.errors import UserError
from trainer.common.files import array_errors, flush_path, has_locked, refusing_disk_errors

Arrays = dict[str, np.ndarray]

_NAMES = "names.txt"
"""Name of the file that lists the arrays of a cache entry, one per line."""
_LEFT_FOR_S = 3600.0
"""Seconds without a new file after which a temporary folder counts as left by a killed build, not as in use."""


def cached_arrays(cache_dir: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """Returns cached arrays, read-only and memory-mapped; builds them if the entry is missing or lacks a file.

    If several processes need a missing entry, one process builds it while the other processes wait. If the file system
    does not share kernel locks, each builds it, and the first to finish stores it. A killed build leaves no incomplete
    entry: arrays are written to a temporary folder and flushed, and then the folder is renamed.

    cache_dir: a folder shared by all processes of the machine; created if missing. key: a valid file name that
    identifies content and format version. build: returns arrays by name; names must be valid file names. Exceptions of
    `build` are raised unchanged.

    Raises UserError if the folder is not writable, the disk is full, or an entry is unreadable.
    """
    entry = cache_dir / key
    flag, advice = f"--cache-dir {cache_dir}", "choose a folder that can be written to and has room"
    if not _is_complete(entry):
        with refusing_disk_errors(flag, advice):
            cache_dir.mkdir(parents=True, exist_ok=True)
            lock = open(cache_dir / f"{key}.lock", "a")  # noqa: SIM115 (closed below; does not empty a link's target)
            has_locked(fcntl.flock, lock, fcntl.LOCK_EX)
            # Creating this folder also makes NFS look up the entry again, which another machine may just have stored.
            partial = cache_dir / f"{key}.{secrets.token_hex(4)}.partial"
            partial.mkdir()
        try:
            if not _is_complete(entry):
                arrays = build()
                with refusing_disk_errors(flag, advice):
                    _store(arrays, partial, entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.close()
    try:
        with array_errors():
            # np.asarray, because indexing a memmap takes microseconds longer than indexing an ndarray
            return {
                name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False))
                for name in _names(entry)
            }
    except (OSError, ValueError) as error:
        raise UserError(f"--cache-dir: {entry} is damaged ({error}); delete that folder") from None


def cached_numbers(cache_dir: Path, key: str, build: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Returns cached numbers by name, in the order of `build`; otherwise works like `cached_arrays`."""

    def arrays() -> Arrays:
        numbers = build()
        return {"names": array_of_texts([*numbers]), "values": np.array([*numbers.values()], np.float64)}

    found = cached_arrays(cache_dir, key, arrays)
    return dict(zip(texts_of_array(found["names"]), found["values"].tolist(), strict=True))


def key_of(name: str, *identity: object) -> str:
    """Returns a cache key. name: kind of content. identity: values that determine the content, hashed by `repr`."""
    return f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"


def digest_of(*parts: np.ndarray | str) -> str:
    """Returns a hash of strings and arrays, including dtypes and shapes, that is equal on all machines."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{part}\n".encode(errors="surrogateescape"))
        else:
            digest.update(f"{part.dtype.str}{part.shape}\n".encode())
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def array_of_texts(texts: Sequence[str]) -> np.ndarray:
    """Encodes strings, which must not contain line breaks, as an array for the cache."""
    return np.frombuffer("\n".join(texts).encode(), np.uint8)


def texts_of_array(array: np.ndarray) -> tuple[str, ...]:
    """Returns the strings that `array_of_texts` encoded."""
    return tuple(array.tobytes().decode().split("\n")) if array.size else ()


def _names(entry: Path) -> list[str]:
    return (entry / _NAMES).read_text(encoding="utf-8").splitlines()


def _is_complete(entry: Path) -> bool:
    try:
        names = {f"{name}.npy" for name in _names(entry)}
    except (OSError, ValueError):
        return False
    return names == {path.name for path in entry.glob("*.npy")}


def _store(arrays: Arrays, partial: Path, entry: Path) -> None:
    for left in entry.parent.glob(f"{entry.name}.*partial"):
        with suppress(FileNotFoundError):
            if partial.stat().st_mtime - left.stat().st_mtime > _LEFT_FOR_S:
                shutil.rmtree(left)
    partial.mkdir(exist_ok=True)
    for name, array in arrays.items():
        with open(partial / f"{name}.npy", "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    (partial / _NAMES).write_text("\n".join(arrays), encoding="utf-8")
    flush_path(partial / _NAMES)
    flush_path(partial)
    try:
        partial.rename(entry)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _is_complete(entry):  # of another process, whose files may be mapped and must stay
            return
        shutil.rmtree(entry)
        partial.rename(entry)
    flush_path(entry.parent)
