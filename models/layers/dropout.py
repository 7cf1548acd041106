"""Dropout (Srivastava et al., JMLR 2014) that is also fast on a CPU."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 2**16


def dropout_mask(shape: Sequence[int], p: float, like: Tensor) -> Tensor:
    """Returns a dropout mask with dtype and device of `like`: 0 with probability p in [0, 1), else 1 / (1 - p).

    On a CPU, each random 64-bit word yields four elements, and p is rounded to a multiple of 2^-16. The scale uses the
    rounded p, so the mask's expected value is exactly 1. On a GPU and under torch.compile, torch draws the mask.
    """
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(like.new_ones(shape), p)
    size, num_dropped = math.prod(shape), min(round(p * _LEVELS), _LEVELS - 1)
    words = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None)
    mask = like.new_empty(size)
    torch.ge(words.view(torch.int16)[:size], num_dropped - _LEVELS // 2, out=mask)  # faster than torch.where
    return mask.mul_(_LEVELS / (_LEVELS - num_dropped)).view(shape)


class Dropout(nn.Module):
    """Drop-in replacement for nn.Dropout that, on a CPU, draws masks faster with `dropout_mask`."""

    def __init__(self, p: float) -> None:
        """Creates the layer. p: probability of zeroing an element, in [0, 1)."""
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        return x * dropout_mask(x.shape, self.p, x)

    def extra_repr(self) -> str:
        return f"p={self.p}"
