"""Functions for sharded tensors, meta tensors and containers of tensors."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")  # isinstance would import DTensor, which takes seconds


def local_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors without copies, with this process's shard (possibly empty) in place of each DTensor."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def empty_like(value: Tensor, device: torch.device) -> Tensor:
    """Allocates an uninitialised tensor of the same shape and dtype on a device."""
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to pinned memory if the device is a GPU, so that the host need not wait for the upload."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Copies nested dicts, lists and tuples, applying `function` to tensors; converts NumPy to Python scalars."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (dict, OrderedDict, Counter):
        replaced = copy.copy(value)  # keeps the attributes of state dicts
        for name, item in value.items():
            replaced[name] = map_tensors(item, function)
        return replaced
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def with_shapes_of(large: Collection[str], loaded: Any) -> Any:
    """Copies a checkpoint; in the entries that `large` names, meta tensors replace all tensors except scalars.

    loaded: a checkpoint's entries, or a dataclass with dicts of entries.
    """
    if is_dataclass(loaded) and not isinstance(loaded, type):
        parts = {field.name: with_shapes_of(large, getattr(loaded, field.name)) for field in fields(loaded)}
        return replace(loaded, **parts)
    if not isinstance(loaded, dict):
        return loaded
    return {name: map_tensors(item, _outline) if name in large else item for name, item in loaded.items()}


def _outline(value: Tensor) -> Tensor:
    return empty_like(value, torch.device("meta")) if value.dim() else value
