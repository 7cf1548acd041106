"""Measures whether worker processes save time, and whether they can share the data."""

import io
import pickle
from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.common.torch_private import num_writes

NUM_BATCHES, BLOCK = 40, 8
"""Batches in a trial, and in each of its blocks; the fastest block counts, except the first."""
LEAST_S, LEAST_SHARE = 5e-4, 0.1
"""Minimum time to make a batch, in seconds and as a share of a step; receiving one takes tenths of a ms."""
MOST_COMPARED, MOST_READ = 2**16, 2**24
"""Limits in bytes: arrays compared by value, and other attributes that are read."""
UNKNOWN = "unknown"
"""Digest of an object that cannot be inspected, such as an open database."""
TOLD = "at"
"""A task's attribute for the run's position; it changes, but no batch depends on it."""
_NOT_ENTERED = (type, FunctionType, BuiltinFunctionType, ModuleType)


class Trial:
    """Measures the time to make a batch, and the time until the next request."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []
        self.last: float | None = None
        """When the last batch was made; None if the time until the next one does not count."""

    def add(self, start: float, end: float) -> bool:
        """Records the start and end of making a batch; returns whether the trial is over."""
        if self.last is not None:
            self._times.append((end - start, start - self.last))
        self.last = end
        return len(self._times) == NUM_BATCHES

    def outcome(self) -> tuple[bool, str]:
        """Returns whether workers save time, and the times in words. A GPU lagging behind the host does not show."""
        blocks = [self._times[start : start + BLOCK] for start in range(BLOCK, NUM_BATCHES, BLOCK)]
        made, between = min(([sum(part) / BLOCK for part in zip(*block, strict=True)] for block in blocks), key=sum)
        times = f"a batch takes {1e3 * made:.2g} ms to make and {1e3 * between:.2g} ms to learn from"
        return made >= max(LEAST_S, LEAST_SHARE * (made + between)), times


def outline(roots: Iterable[Any]) -> dict[str, Any]:
    """Returns a digest (or UNKNOWN) of each attribute of some objects, by names such as "Windows.cache".

    Equal outlines mean no change, except single numbers of large arrays. Reading from an open file or drawing from a
    generator is a change.
    """
    found: dict[str, Any] = {}
    for root in roots:
        for name, value in _attributes(root).items():
            path = f"{type(root).__name__}.{name}"
            inner = {} if isinstance(value, (*_NOT_ENTERED, Tensor)) else _attributes(value)
            found |= {f"{path}.{part}": _digest(item) for part, item in inner.items()} or {path: _digest(value)}
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Returns attributes by name, without TOLD and cached properties."""
    held, kind = getattr(value, "__dict__", {}), type(value)
    names = [name for name in held if name != TOLD and not isinstance(getattr(kind, name, None), cached_property)]
    return {name: held[name] for name in names}


def _digest(value: Any) -> bytes | str:
    found, num_bytes = blake2b(digest_size=16), 0

    def write(data: Any) -> None:
        nonlocal num_bytes
        num_bytes += memoryview(data).nbytes
        if num_bytes > MOST_READ:
            raise OverflowError
        found.update(data)

    try:
        _Outliner(SimpleNamespace(write=write), protocol=5).dump(value)
    except Exception:  # the object cannot be inspected, or is too large
        return UNKNOWN
    return found.digest()


class _Outliner(pickle.Pickler):
    """Pickles an object, but tensors, functions and files by identity and state."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.data_ptr() if value.layout == torch.strided else id(value), value.shape, num_writes(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            numbers = value.tobytes() if value.nbytes <= MOST_COMPARED else b""
            return value.__array_interface__["data"], value.shape, numbers
        if isinstance(value, io.IOBase):
            return id(value), value.tell()
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        return id(value) if isinstance(value, _NOT_ENTERED) else None

    def reducer_override(self, value: Any) -> Any:
        """Pickles all attributes of an object whose own `__getstate__` would omit some."""
        own = type(value).__dict__.get("__getstate__")
        return NotImplemented if own is None else (type(value), (), dict(vars(value)))
