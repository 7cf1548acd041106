"""What numpy and torch spell differently, for data that lie on the host or on a device.

numpy computes on the host, where it is the faster one on the few numbers of a batch, and torch on a device.
"""

import sys
from typing import Any, Literal

import numpy as np

Array = Any
"""A numpy array or a tensor. Both have operators, indexing, `shape` and methods such as `sum(axis=0)`."""

_OF_NUMPY = np.ndarray, np.generic


def on_host(array: Array) -> bool:
    """Whether it is numpy's; otherwise it is a tensor."""
    return isinstance(array, _OF_NUMPY)


def namespace(array: Array) -> Any:
    """numpy for an array, torch for a tensor: functions that both have, such as `where`, `stack` and `cos`."""
    return np if on_host(array) else sys.modules["torch"]  # which what computes on the host need not import


def cast(array: Array, name: Literal["bool", "int32", "int64", "float32", "float64"]) -> Array:
    """An array as another type; the array itself if it is of that type."""
    return array.astype(name, copy=False) if on_host(array) else array.to(getattr(namespace(array), name))


def rows(array: Array, index: Array) -> Array:
    """The rows of an array (n, ...) at the positions index (m,): (m, ...)."""
    return array.take(index, axis=0) if on_host(array) else array.index_select(0, index)


def arange_like(num: int, array: Array) -> Array:
    """The numbers 0 to num - 1, (num,) int64, where an array lies."""
    return np.arange(num) if on_host(array) else namespace(array).arange(num, device=array.device)


def empty_beside(array: Array, shape: tuple[int, ...]) -> Array:
    """Memory of a shape where an array lies, of its type."""
    return np.empty(shape, array.dtype) if on_host(array) else array.new_empty(shape)


def take_along(array: Array, index: Array, axis: int) -> Array:
    """The elements at positions along an axis, by `np.take_along_axis`, of the shape of index."""
    return np.take_along_axis(array, index, axis) if on_host(array) else array.take_along_dim(index, axis)


class Ragged:
    """Rows of different lengths that lie in arrays behind each other, as a matrix with zeros behind each.

    is_real: (B, width) bool, which entries belong to the rows.
    """

    def __init__(self, start: Array, length: Array, width: int) -> None:
        """start, length: (B,) int64, where the rows begin, and how long they are."""
        column = arange_like(width, start)
        self.is_real = column < length[:, None]
        self._position = (start[:, None] + column) * self.is_real

    def of(self, values: Array, ahead: int = 0) -> Array:
        """values[start + ahead : start + ahead + length] of each row: (B, width), of the type of values."""
        return values.take(self._position + ahead if ahead else self._position) * self.is_real
