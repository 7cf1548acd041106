"""Classes of a batch of problems of different sizes."""

import math

import torch
from torch import Tensor

from models.layers.lengths import within_lengths


def of_present_classes(logits: Tensor, num_classes: Tensor | None) -> Tensor:
    """Logits (B, Q, max_classes) in float32 or wider, -inf from class num_classes on. num_classes: (B,); None: all."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_classes is None:
        return logits
    return logits.masked_fill(~within_lengths(num_classes, logits.shape[2]).unsqueeze(1), -math.inf)
