"""Arrays that are built once, kept on disk, memory-mapped and shared by all processes of a machine."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from trainer.common.errors import UserError
from trainer.common.files import array_errors, flush_path, refusing_disk_errors

Arrays = dict[str, np.ndarray]

_NAMES = "names.txt"
"""Of the arrays of an entry, one a line."""


def cached_arrays(cache_dir: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays stored under the key, read-only and memory-mapped; built first where there are none.

    Of several processes that ask at the same time one builds and the others wait. A build that is killed leaves
    nothing that a later one would take for complete: the arrays are written into a temporary folder, flushed to
    disk, and the folder is renamed.

    cache_dir: created if need be; on a disk that all processes of the machine see.
    key: names content and format version; a valid file name.
    build: returns arrays under names that are valid file names. What it raises passes through.

    An entry that lacks something, as where old files were deleted, is built again. Raises UserError when the folder
    cannot be written to, is full, or holds an entry that cannot be read.
    """
    entry = cache_dir / key
    flag, advice = f"--cache-dir {cache_dir}", "choose a folder that can be written to and has room"
    if not _is_complete(entry):
        with refusing_disk_errors(flag, advice):
            cache_dir.mkdir(parents=True, exist_ok=True)
            lock = open(cache_dir / f"{key}.lock", "w")  # noqa: SIM115 (closed below)
            fcntl.flock(lock, fcntl.LOCK_EX)
        with lock:
            if not _is_complete(entry):
                arrays = build()
                with refusing_disk_errors(flag, advice):
                    _store(arrays, entry)
    try:
        with array_errors():
            # As plain ndarray: indexing the memmap subclass costs microseconds more each time.
            return {
                name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False))
                for name in _names(entry)
            }
    except (OSError, ValueError) as error:
        raise UserError(f"--cache-dir: {entry} is damaged ({error}); delete that folder") from None


def cached_numbers(cache_dir: Path, key: str, build: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Numbers by name, in the order in which they were built; see `cached_arrays`."""

    def arrays() -> Arrays:
        numbers = build()
        return {"names": array_of_texts([*numbers]), "values": np.array([*numbers.values()], np.float64)}

    found = cached_arrays(cache_dir, key, arrays)
    return dict(zip(texts_of_array(found["names"]), found["values"].tolist(), strict=True))


def key_of(name: str, *identity: object) -> str:
    """That of an entry. name: of what it is. identity: what it depends on, in values whose `repr` says all of them."""
    return f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"


def digest_of(*parts: np.ndarray | str) -> str:
    """Of arrays, with types and shapes, and texts: the same on any machine."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{part}\n".encode(errors="surrogateescape"))
        else:
            digest.update(f"{part.dtype.str}{part.shape}\n".encode())
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def array_of_texts(texts: Sequence[str]) -> np.ndarray:
    """Texts without line breaks, however long some of them are, as an array that can be cached."""
    return np.frombuffer("\n".join(texts).encode(), np.uint8)


def texts_of_array(array: np.ndarray) -> tuple[str, ...]:
    """The opposite; an empty array holds no text."""
    return tuple(array.tobytes().decode().split("\n")) if array.size else ()


def _names(entry: Path) -> list[str]:
    return (entry / _NAMES).read_text(encoding="utf-8").splitlines()


def _is_complete(entry: Path) -> bool:
    try:
        names = _names(entry)
    except (OSError, ValueError):
        return False
    return all((entry / f"{name}.npy").exists() for name in names)


def _store(arrays: Arrays, entry: Path) -> None:
    partial = entry.with_name(f"{entry.name}.partial")
    # One that is there was left by a build that was killed: the lock says that nobody else is at it.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        for name, array in arrays.items():
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        (partial / _NAMES).write_text("\n".join(arrays), encoding="utf-8")
        flush_path(partial / _NAMES)
        flush_path(partial)
        if entry.exists():
            shutil.rmtree(entry)  # who has one of its files open keeps that
        partial.rename(entry)
        flush_path(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
