"""Masks for padded sequences, and for classification problems with different numbers of classes."""

import math

import torch
from torch import Tensor


def within_lengths(lengths: Tensor, size: int) -> Tensor:
    """Returns a bool mask, (B, size), that is True at the first lengths[b] positions of each sequence b."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def of_present_classes(logits: Tensor, num_classes: Tensor | None) -> Tensor:
    """Returns logits (B, Q, max_classes) in at least float32, with -inf for classes c >= num_classes[b]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_classes is None:
        return logits
    return logits.masked_fill(~within_lengths(num_classes, logits.shape[2]).unsqueeze(1), -math.inf)
