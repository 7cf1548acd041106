"""Masks for padded sequences, and for problems with different numbers of classes."""

import math

import torch
from torch import Tensor


def within_lengths(lengths: Tensor, size: int) -> Tensor:
    """Returns whether each position is below the sequence's length: (B,) -> (B, size) bool."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def of_present_classes(logits: Tensor, num_classes: Tensor | None) -> Tensor:
    """Returns logits (B, Q, max_classes), in at least float32, with -inf for classes from num_classes (B,) on."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_classes is None:
        return logits
    return logits.masked_fill(~within_lengths(num_classes, logits.shape[2]).unsqueeze(1), -math.inf)
