"""Masks for sequences or problems of different sizes, padded at the end."""

import math

import torch
from torch import Tensor


def within_lengths(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool: True at positions before each end."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def of_present_classes(logits: Tensor, num_classes: Tensor | None) -> Tensor:
    """Sets logits (B, Q, max_classes) to -inf from class num_classes on, in at least float32. num_classes: (B,); None:
    all.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_classes is None:
        return logits
    return logits.masked_fill(~within_lengths(num_classes, logits.shape[2]).unsqueeze(1), -math.inf)
