"""Whether worker processes save time, and whether they may have the data: what the first batches take and change."""

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
"""Batches that a trial takes, and the size of its blocks: the quickest block counts, without the first one."""
LEAST_S, LEAST_SHARE = 5e-4, 0.1
"""What making a batch must take, in seconds and as a share of a step: receiving one takes some tenths of a ms."""
MOST_COMPARED, MOST_READ = 2**16, 2**24
"""Bytes of an array whose numbers are compared, and bytes of an attribute besides arrays that are read."""
UNKNOWN = "unknown"
"""The digest of what cannot be looked into, such as an open database."""
TOLD = "at"
"""The attribute of a task that says where the run is: it changes, and no batch depends on it."""
_NOT_ENTERED = (type, FunctionType, BuiltinFunctionType, ModuleType)


class Trial:
    """What this process takes to make a batch, and what passes until it is asked for the next one."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []
        self.last: float | None = None
        """When the last batch was made; None where what passes until the next one does not count."""

    def add(self, start: float, end: float) -> bool:
        """Notes when the making of a batch began and ended; returns whether that was the last one."""
        if self.last is not None:
            self._times.append((end - start, start - self.last))
        self.last = end
        return len(self._times) == NUM_BATCHES

    def outcome(self) -> tuple[bool, str]:
        """Whether processes save time, and the times in words. A GPU that is behind the host shows in neither."""
        blocks = [self._times[start : start + BLOCK] for start in range(BLOCK, NUM_BATCHES, BLOCK)]
        made, between = min(([sum(part) / BLOCK for part in zip(*block, strict=True)] for block in blocks), key=sum)
        times = f"a batch takes {1e3 * made:.2g} ms to make and {1e3 * between:.2g} ms to learn from"
        return made >= max(LEAST_S, LEAST_SHARE * (made + between)), times


def outline(roots: Iterable[Any]) -> dict[str, Any]:
    """By name, such as "Windows.cache", a digest of what each attribute of some objects holds, or UNKNOWN.

    Two outlines are equal where nothing was changed, but for single numbers of large arrays. Whoever reads from an open
    file or draws from a generator changes it.
    """
    found: dict[str, Any] = {}
    for root in roots:
        for name, value in _attributes(root).items():
            path = f"{type(root).__name__}.{name}"
            inner = {} if isinstance(value, (*_NOT_ENTERED, Tensor)) else _attributes(value)
            found |= {f"{path}.{part}": _digest(item) for part, item in inner.items()} or {path: _digest(value)}
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes by name, without TOLD and cached properties."""
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
    except Exception:  # whatever an object raises that does not let itself be looked into, or is too large
        return UNKNOWN
    return found.digest()


class _Outliner(pickle.Pickler):
    """Walks through an object. Of tensors, functions and files it writes the place and the state."""

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
        """All attributes, of an object that would leave some out when it is sent to a process."""
        own = type(value).__dict__.get("__getstate__")
        return NotImplemented if own is None else (type(value), (), dict(vars(value)))
