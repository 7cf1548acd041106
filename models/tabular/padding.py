"""What of a batch of problems of different sizes is real."""

import math

import torch
from torch import Tensor


def rows_within(num_rows: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, True at the first num_rows[b]."""
    return torch.arange(size, device=num_rows.device) < num_rows.unsqueeze(1)


def of_present_classes(logits: Tensor, num_classes: Tensor | None) -> Tensor:
    """Logits (B, Q, max_classes) in float32 or wider, -inf from class num_classes on. num_classes: (B,); None: all."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_classes is None:
        return logits
    return logits.masked_fill(~rows_within(num_classes, logits.shape[2]).unsqueeze(1), -math.inf)
