"""Tensors of which a process holds a part alone."""

from collections.abc import Sequence

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of it alone."""
    return hasattr(tensor, "to_local")  # of a DTensor, whose module takes seconds to import


def local_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What this process holds of tensors, in the same memory: of sharded ones a part, which may be empty."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
