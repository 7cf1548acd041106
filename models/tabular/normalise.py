"""Standardisation of the columns of a table by statistics of the context rows."""

import torch
from torch import Tensor

from models.layers.lengths import within_lengths

_KNEE = 3.0
"""Number of standard deviations up to which normalisation is nearly linear; above, it is nearly logarithmic."""
_FARTHEST = 1e6
"""Number of standard deviations at which values are clipped before `3 asinh(z / 3)` is applied."""


def normalise(context: Tensor, queries: Tensor, num_context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Standardises columns by mean and std of their context rows, then maps each z to 3 asinh(z / 3) to limit outliers.

    context: (B, N, m), queries: (B, Q, m); non-finite elements are missing values. num_context: (B,) int64, number of
    context rows without padding (default: N). Returns values of shape (B, N + Q, m) from -41 to 41, context rows first,
    and a bool tensor of this shape that is True at missing values. Missing values become 0. All values of a column
    become 0 if the column's context values are equal up to rounding.
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
