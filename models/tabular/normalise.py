"""Standardisation of a table's columns by statistics of its context rows."""

import torch
from torch import Tensor

from models.layers.lengths import within_lengths

_KNEE = 3.0
"""Number of standard deviations up to which normalisation is nearly linear; above, it is nearly logarithmic."""
_FARTHEST = 1e6
"""Number of standard deviations at which values are clipped, before asinh maps this number to 40."""


def normalise(context: Tensor, queries: Tensor, num_context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Standardises columns by their context rows, then applies 3 asinh(z / 3) against outliers.

    context: (B, N, m), queries: (B, Q, m), with non-finite numbers for missing values. num_context: (B,) int64, number
    of context rows without padding, or None for N. Returns the normalised values of context and queries, (B, N + Q, m),
    from -41 to 41, and a bool tensor of the same shape, True where a value is missing. Missing values become 0, as do
    all values of a column that is constant in the context up to rounding.
    """
    known = context.isfinite()
    if num_context is not None:
        known &= within_lengths(num_context, context.shape[1]).unsqueeze(2)
    count = known.sum(dim=1, keepdim=True).clamp(min=1)
    known_values = context.where(known, 0)
    largest = known_values.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(context.dtype).tiny)
    known_values = known_values / largest  # prevents overflow of squares
    mean = known_values.sum(dim=1, keepdim=True) / count
    std = ((known_values - mean).where(known, 0).square().sum(dim=1, keepdim=True) / count).sqrt()
    rows = torch.cat([context, queries], dim=1)
    missing = ~rows.isfinite()
    nothing = missing | (std <= 8 * torch.finfo(context.dtype).eps)
    z = ((rows / largest - mean) / std).clamp(-_FARTHEST, _FARTHEST)
    return (_KNEE * torch.asinh(z / _KNEE)).masked_fill(nothing, 0), missing
