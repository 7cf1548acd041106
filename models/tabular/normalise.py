"""Columns of a table on one scale, by what its context rows hold."""

import torch
from torch import Tensor

from models.layers.lengths import within_lengths

_KNEE = 3.0
"""Standard deviations below which asinh is nearly the identity; beyond, it is a logarithm."""
_FARTHEST = 1e6
"""Standard deviations beyond which all is one; they become 40."""


def normalise(context: Tensor, queries: Tensor, num_context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean 0 and standard deviation 1 over a column's context rows, then 3 asinh(z / 3), which tames outliers.

    context: (B, N, m), queries: (B, Q, m), numbers of any size; what is not finite counts as missing.
    num_context: (B,) int64, how many of the N rows are real; all by default.
    Returns the values of context and queries, (B, N + Q, m), within +-41, and a bool tensor of that shape, True where
    one is missing: its value is 0. So are those of a column that is constant in the context, up to rounding.
    """
    known = context.isfinite()
    if num_context is not None:
        known &= within_lengths(num_context, context.shape[1]).unsqueeze(2)
    count = known.sum(dim=1, keepdim=True).clamp(min=1)
    known_values = context.where(known, 0)
    largest = known_values.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(context.dtype).tiny)
    known_values = known_values / largest  # squares of huge numbers would overflow
    mean = known_values.sum(dim=1, keepdim=True) / count
    std = ((known_values - mean).where(known, 0).square().sum(dim=1, keepdim=True) / count).sqrt()
    rows = torch.cat([context, queries], dim=1)
    missing = ~rows.isfinite()
    nothing = missing | (std <= 8 * torch.finfo(context.dtype).eps)
    z = ((rows / largest - mean) / std).clamp(-_FARTHEST, _FARTHEST)
    return (_KNEE * torch.asinh(z / _KNEE)).masked_fill(nothing, 0), missing
