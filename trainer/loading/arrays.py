"""Array operations that work on NumPy arrays and on tensors, for data on the host or on a device.

Data sets use PyTorch on a device, and NumPy on the host, where NumPy is faster for arrays as small as a batch.
"""

import sys
from typing import Any, Literal

import numpy as np

Array = Any
"""A NumPy array or a tensor; both support operators, indexing, `shape` and methods such as `sum(axis=0)`."""

_OF_NUMPY = np.ndarray, np.generic


def on_host(array: Array) -> bool:
    """Returns whether an array is a NumPy array or scalar, not a tensor."""
    return isinstance(array, _OF_NUMPY)


def namespace(array: Array) -> Any:
    """Returns the module numpy or torch, for functions that both have, such as `where`, `stack` and `cos`."""
    return np if on_host(array) else sys.modules["torch"]  # NumPy arrays must not cause an import of torch


def cast(array: Array, name: Literal["bool", "int32", "int64", "float32", "float64"]) -> Array:
    """Converts an array to a dtype; returns it unchanged if it has this dtype."""
    return array.astype(name, copy=False) if on_host(array) else array.to(getattr(namespace(array), name))


def rows(array: Array, index: Array) -> Array:
    """Returns the rows of an array at m positions: (n, ...) -> (m, ...)."""
    return array.take(index, axis=0) if on_host(array) else array.index_select(0, index)


def arange_like(num: int, array: Array) -> Array:
    """Returns the integers 0 to num - 1 as int64, on the same device as `array`."""
    return np.arange(num) if on_host(array) else namespace(array).arange(num, device=array.device)


def empty_beside(array: Array, shape: tuple[int, ...]) -> Array:
    """Returns an uninitialised array with the device and dtype of another array."""
    return np.empty(shape, array.dtype) if on_host(array) else array.new_empty(shape)


def take_along(array: Array, index: Array, axis: int) -> Array:
    """Returns the elements at `index` along an axis, like `np.take_along_axis`."""
    return np.take_along_axis(array, index, axis) if on_host(array) else array.take_along_dim(index, axis)


class Ragged:
    """Rows of different lengths, stored one after another in a flat array, and read as a zero-padded matrix.

    is_real: (B, width) bool, True for entries that are not padding.
    """

    def __init__(self, start: Array, length: Array, width: int) -> None:
        """start, length: (B,) int64, start and length of each row in the flat array. width: matrix columns."""
        column = arange_like(width, start)
        self.is_real = column < length[:, None]
        self._position = (start[:, None] + column) * self.is_real

    def of(self, values: Array, ahead: int = 0) -> Array:
        """Returns values[start + ahead : start + ahead + length] for each row, padded with zeros to (B, width)."""
        return values.take(self._position + ahead if ahead else self._position) * self.is_real
