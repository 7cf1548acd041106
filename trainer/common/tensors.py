"""Tensors in states, and those of which this process has a shard or nothing but the shape."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of it alone."""
    return hasattr(tensor, "to_local")  # of a DTensor, whose module takes seconds to import


def local_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What this process holds of tensors, in the same memory: of sharded ones a part, which may be empty."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def empty_like(value: Tensor, device: torch.device) -> Tensor:
    """One of its shape and type, without content."""
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested mappings, lists and tuples, with another tensor in the place of each."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (dict, OrderedDict, Counter):
        replaced = copy.copy(value)  # a state dict carries attributes too
        for name, item in value.items():
            replaced[name] = map_tensors(item, function)
        return replaced
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def with_shapes_of(large: Collection[str], loaded: Any) -> Any:
    """What rank 0 loaded, with tensors without content in its large entries; tensors of single numbers stay.

    loaded: the entries of a checkpoint, or a dataclass that holds them.
    """
    if is_dataclass(loaded) and not isinstance(loaded, type):
        parts = {field.name: with_shapes_of(large, getattr(loaded, field.name)) for field in fields(loaded)}
        return replace(loaded, **parts)
    if not isinstance(loaded, dict):
        return loaded
    return {name: map_tensors(item, _outline) if name in large else item for name, item in loaded.items()}


def _outline(value: Tensor) -> Tensor:
    return empty_like(value, torch.device("meta")) if value.dim() else value
