"""Standardises a table's columns by its context rows."""

import torch
from torch import Tensor

from models.layers.lengths import within_lengths

_KNEE = 3.0
"""Standard deviations up to which asinh is nearly the identity; beyond, it is logarithmic."""
_FARTHEST = 1e6
"""Standard deviations at which values are clipped; they become 40."""


def normalise(context: Tensor, queries: Tensor, num_context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Standardises columns by their context rows, then applies 3 asinh(z / 3) against outliers.

    context: (B, N, m), queries: (B, Q, m), any numbers; non-finite ones are missing. num_context: (B,) int64, real rows
    of N; default: all. Returns values of context and queries, (B, N + Q, m), within +-41, and a bool tensor of that
    shape, True where missing (value 0). Columns constant in the context, up to rounding, are 0 too.
    """
    known = context.isfinite()
    if num_context is not None:
        known &= within_lengths(num_context, context.shape[1]).unsqueeze(2)
    count = known.sum(dim=1, keepdim=True).clamp(min=1)
    known_values = context.where(known, 0)
    largest = known_values.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(context.dtype).tiny)
    known_values = known_values / largest  # avoids overflow of squares
    mean = known_values.sum(dim=1, keepdim=True) / count
    std = ((known_values - mean).where(known, 0).square().sum(dim=1, keepdim=True) / count).sqrt()
    rows = torch.cat([context, queries], dim=1)
    missing = ~rows.isfinite()
    nothing = missing | (std <= 8 * torch.finfo(context.dtype).eps)
    z = ((rows / largest - mean) / std).clamp(-_FARTHEST, _FARTHEST)
    return (_KNEE * torch.asinh(z / _KNEE)).masked_fill(nothing, 0), missing
