"""Multi-head attention (Vaswani et al., 2017, section 3.2) for tables, which are batches of many short sequences."""

import math
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEW_KEYS = 24
"""Maximum number of keys for which matrix products are faster on a CPU than torch's fused attention."""
_MAX_SEQUENCES = 65_535
"""Maximum number of sequences in one call of CUDA's fused attention kernels."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns softmax(q k^T / sqrt(d)) v for each sequence and head, (S, T, heads, d).

    query: (S, T, heads, d). key, value: (S, K, heads, d). mask: (S, 1, 1, K) bool, True at keys to attend to, at least
    one key per sequence (default: all keys).
    """
    # A program that is exported for any number of keys cannot branch on this number.
    if query.device.type == "cpu" and not torch.compiler.is_compiling() and key.shape[1] <= _FEW_KEYS:
        return _attend_to_few(query, key, value, mask)
    if query.device.type == "cuda" and query.shape[0] > _MAX_SEQUENCES:
        masks = repeat(None) if mask is None else mask.split(_MAX_SEQUENCES)
        parts = zip(*(x.split(_MAX_SEQUENCES) for x in (query, key, value)), masks, strict=False)
        return torch.cat([attend(*part) for part in parts])
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def _attend_to_few(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    num_sequences, num_queries, num_heads, width = query.shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query * width**-0.5, key, value))
    logits = query @ key.transpose(1, 2)
    if mask is not None:
        logits = logits.unflatten(0, (num_sequences, num_heads)).masked_fill(~mask, -math.inf)
    # torch vectorises a softmax over the first dimension, but not over a short last dimension.
    columns = logits.reshape(-1, logits.shape[-1]).t().contiguous()
    weights = columns.softmax(dim=0).t().reshape(num_sequences * num_heads, num_queries, -1)
    return (weights @ value).unflatten(0, (num_sequences, num_heads)).transpose(1, 2)


class Attention(nn.Module):
    """Projections of multi-head attention, (..., width) -> (..., heads, width / heads); the caller applies `attend`."""

    def __init__(self, width: int, num_heads: int, bias: bool = False) -> None:
        """Creates the projections. width: a multiple of num_heads."""
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias) for _ in range(4))

    def queries(self, x: Tensor) -> Tensor:
        return self._by_head(self.query(x))

    def keys(self, x: Tensor) -> Tensor:
        return self._by_head(self.key(x))

    def values(self, x: Tensor) -> Tensor:
        return self._by_head(self.value(x))

    def merge(self, attended: Tensor) -> Tensor:
        """Concatenates heads and applies the output projection: (..., heads, width / heads) -> (..., width)."""
        return self.out(attended.flatten(-2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))
