"""Measures whether worker processes save time, and detects changes to data that workers would not see."""

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
"""Numbers of batches in a trial, and in each of its blocks; the fastest block after the first decides."""
LEAST_S, LEAST_SHARE = 5e-4, 0.1
"""Least time to make a batch, in seconds and as a fraction of a step's time, for which workers pay off."""
MOST_COMPARED, MOST_READ = 2**16, 2**24
"""Largest size in bytes of arrays that are compared by value, and of other attributes that are compared at all."""
UNKNOWN = "unknown"
"""Stands for the digest of an object that cannot be read, such as an open database."""
TOLD = "at"
"""Name of a task's attribute for the run's position, which changes but does not affect batches."""
_NOT_ENTERED = (type, FunctionType, BuiltinFunctionType, ModuleType)


class Trial:
    """Measures the time to make a batch, and the time until the next batch is requested."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []
        self.last: float | None = None
        """Time at which the last batch was made, or None if the time until the next batch does not count."""

    def add(self, start: float, end: float) -> bool:
        """Records when the making of a batch started and ended; returns whether the trial is over."""
        if self.last is not None:
            self._times.append((end - start, start - self.last))
        self.last = end
        return len(self._times) == NUM_BATCHES

    def outcome(self) -> tuple[bool, str]:
        """Returns whether workers save time, and the measured host times of a batch as text."""
        blocks = [self._times[start : start + BLOCK] for start in range(BLOCK, NUM_BATCHES, BLOCK)]
        made, between = min(([sum(part) / BLOCK for part in zip(*block, strict=True)] for block in blocks), key=sum)
        times = f"a batch takes {1e3 * made:.2g} ms to load and {1e3 * between:.2g} ms to train on"
        return made >= max(LEAST_S, LEAST_SHARE * (made + between)), times


def outline(roots: Iterable[Any]) -> dict[str, Any]:
    """Returns a dictionary from attribute names, such as "Windows.cache", to digests of the values (or UNKNOWN).

    Equal outlines mean that nothing has changed, except perhaps numbers in large arrays. Reading from an open file or
    drawing from a random number generator counts as a change.
    """
    found: dict[str, Any] = {}
    for root in roots:
        for name, value in _attributes(root).items():
            path = f"{type(root).__name__}.{name}"
            inner = {} if isinstance(value, (*_NOT_ENTERED, Tensor)) else _attributes(value)
            found |= {f"{path}.{part}": _digest(item) for part, item in inner.items()} or {path: _digest(value)}
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Returns an object's attributes by name, except cached properties and the run's position (TOLD)."""
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
    """Pickles an object for its digest; represents tensors, functions and files by identity and state."""

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
        """Pickles all attributes of an object, even if its `__getstate__` omits some of them."""
        own = type(value).__dict__.get("__getstate__")
        return NotImplemented if own is None else (type(value), (), dict(vars(value)))
