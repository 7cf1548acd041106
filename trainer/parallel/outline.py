"""Checkpoints as the processes know them that did not read them: the tensors come one by one, where they are loaded."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

ENTRIES_OF_WEIGHTS = ("model", "training_model", "optimizers")
"""Of a checkpoint: what only the main process reads."""


def empty_like(value: Tensor, device: torch.device) -> Tensor:
    """One of its shape and type, without content."""
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same with another tensor for each."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: mapped(item, function) for name, item in value.items()}
    return [mapped(item, function) for item in value] if isinstance(value, list) else value


def without_weights(value: Any, is_weight: bool = False) -> Any:
    """What the main process loaded, with outlines of its weights and moments; single numbers stay."""
    if isinstance(value, Tensor):
        return empty_like(value, torch.device("meta")) if is_weight and value.dim() else value
    if isinstance(value, dict):
        return {name: without_weights(item, is_weight or name in ENTRIES_OF_WEIGHTS) for name, item in value.items()}
    if isinstance(value, list):
        return [without_weights(item, is_weight) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: without_weights(getattr(value, field.name)) for field in fields(value)})
    return value
