"""Sequences of unequal lengths in one batch, padded at their ends."""

import torch
from torch import Tensor


def within_lengths(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool: which of the first `size` places lie before each end."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)
