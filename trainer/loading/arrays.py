"""Array operations common to NumPy and torch, for data on the host or on a device.

On the host NumPy is used, which is faster for the few numbers of a batch; on a device torch.
"""

import sys
from typing import Any, Literal

import numpy as np

Array = Any
"""A NumPy array or a tensor. Both support operators, indexing, `shape` and methods such as `sum(axis=0)`."""

_OF_NUMPY = np.ndarray, np.generic


def on_host(array: Array) -> bool:
    """Returns whether an array is NumPy's rather than a tensor."""
    return isinstance(array, _OF_NUMPY)


def namespace(array: Array) -> Any:
    """Returns numpy or torch, for functions that both have, such as `where`, `stack` and `cos`."""
    return np if on_host(array) else sys.modules["torch"]  # code on the host need not import torch


def cast(array: Array, name: Literal["bool", "int32", "int64", "float32", "float64"]) -> Array:
    """Converts an array to a type; returns it unchanged if it has that type."""
    return array.astype(name, copy=False) if on_host(array) else array.to(getattr(namespace(array), name))


def rows(array: Array, index: Array) -> Array:
    """Selects rows of an array (n, ...) at positions index (m,): (m, ...)."""
    return array.take(index, axis=0) if on_host(array) else array.index_select(0, index)


def arange_like(num: int, array: Array) -> Array:
    """Returns 0 to num - 1 on the array's device, (num,) int64."""
    return np.arange(num) if on_host(array) else namespace(array).arange(num, device=array.device)


def empty_beside(array: Array, shape: tuple[int, ...]) -> Array:
    """Allocates an uninitialised array on another one's device, of its type."""
    return np.empty(shape, array.dtype) if on_host(array) else array.new_empty(shape)


def take_along(array: Array, index: Array, axis: int) -> Array:
    """Selects elements along an axis like `np.take_along_axis`, in the shape of index."""
    return np.take_along_axis(array, index, axis) if on_host(array) else array.take_along_dim(index, axis)


class Ragged:
    """Ragged rows stored consecutively, gathered as a zero-padded matrix.

    is_real: (B, width) bool, True where an entry belongs to its row.
    """

    def __init__(self, start: Array, length: Array, width: int) -> None:
        """start, length: (B,) int64, each row's start and length. width: columns of the matrix."""
        column = arange_like(width, start)
        self.is_real = column < length[:, None]
        self._position = (start[:, None] + column) * self.is_real

    def of(self, values: Array, ahead: int = 0) -> Array:
        """Returns values[start + ahead : start + ahead + length] of each row, padded: (B, width)."""
        return values.take(self._position + ahead if ahead else self._position) * self.is_real
