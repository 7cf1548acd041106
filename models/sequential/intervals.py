"""Attention to time intervals, with a table that has one row per interval length.

If r_ij is the row of the interval between query i and key j, this module computes

    logits_ij = query_i . table[r_ij]             (interval_logits)
    sums_i    = sum_j weight_ij table[r_ij]       (interval_sums)

without storing the looked-up rows, (B, Tq, T, width). By default, queries are multiplied by the whole table, and each
pair's logit is selected from the product. For sums, the weights of keys at the same interval are added, then multiplied
by the table. Both methods need a tensor of shape (B, heads, Tq, rows), most of which is unused if the table has many
more rows than there are keys. In this case, on a CPU, embedding bags (torch.nn.functional.embedding_bag) compute the
sums, and the logits are the gradient of the sums w.r.t. the weights. The gradient of the table,

    table_gradient_r = sum over the pairs of row r of weight_ij query_i

is also an embedding bag, over pairs sorted by row. Results are exact up to rounding.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from trainer.common.torch_private import run_backward

_ROWS_PER_KEY = 10
"""Number of rows per key above which embedding bags are faster, measured for 25 to 200 keys."""


class Pairs:
    """Index of the table row that each (query, key) pair looks up."""

    def __init__(self, row: Tensor, num_rows: int) -> None:
        """Stores the indices. row: (B, Tq, T) int64 in [0, num_rows)."""
        self.row = row
        self.num_rows = num_rows

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pair indices sorted by row, each pair's query index, and the position of each row's first pair."""
        row, pair = self.row.flatten().sort(stable=True)
        first = torch.searchsorted(row, torch.arange(self.num_rows))
        return pair, pair // self.row.shape[-1], first


def interval_logits(query: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """Returns query_i . table[r_ij] per head: (B, heads, Tq, C) and (heads, rows, C) -> (B, heads, Tq, T)."""
    if _in_bags(pairs):
        return _by_head(_Logits, query, table, pairs)
    row = pairs.row.unsqueeze(1).expand(-1, query.shape[1], -1, -1)
    return torch.einsum("bhic,hrc->bhir", query, table).gather(-1, row)


def interval_sums(weight: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """Returns sum_j weight_ij table[r_ij] per head: (B, heads, Tq, T) and (heads, rows, C) -> (B, heads, Tq, C)."""
    if _in_bags(pairs):
        return _by_head(_Sums, weight, table, pairs)
    row = pairs.row.unsqueeze(1).expand(-1, weight.shape[1], -1, -1)
    by_row = weight.new_zeros(*weight.shape[:-1], pairs.num_rows).scatter_add_(-1, row, weight)
    # `@` would copy the table for every sequence
    return torch.einsum("bhir,hrc->bhic", by_row, table)


def _in_bags(pairs: Pairs) -> bool:
    # logits by embedding bags are a gradient, but inference_mode disables autograd
    if pairs.row.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return pairs.num_rows > _ROWS_PER_KEY * pairs.row.shape[-1]


def _by_head(product: Any, x: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    heads = zip(x.unbind(1), table, strict=True)
    return torch.stack([product.apply(own, rows, pairs).unflatten(0, own.shape[:2]) for own, rows in heads], dim=1)


class _Logits(torch.autograd.Function):
    """Computes `interval_logits` for one head: (B, Tq, C), (rows, C) -> (B * Tq, T)."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, query: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
        query, table = query.flatten(0, 1), table.contiguous()
        ctx.save_for_backward(query, table)
        ctx.pairs = pairs
        return _logits(query, table, pairs)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        query, table = ctx.saved_tensors
        of_query = _sums(gradient, table, ctx.pairs).unflatten(0, ctx.pairs.row.shape[:2])
        return of_query, _table_gradient(gradient, query, ctx.pairs), None


class _Sums(torch.autograd.Function):
    """Computes `interval_sums` for one head: (B, Tq, T), (rows, C) -> (B * Tq, C)."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, weight: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
        weight, table = weight.flatten(0, 1), table.contiguous()
        ctx.save_for_backward(weight, table)
        ctx.pairs = pairs
        return _sums(weight, table, pairs)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, table = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_weight = _logits(gradient, table, ctx.pairs).view_as(ctx.pairs.row)
        return of_weight, _table_gradient(weight, gradient, ctx.pairs), None


def _sums(weight: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """Returns sum_j weight_ij table[r_ij] for one head: (B * Tq, T), (rows, C) -> (B * Tq, C)."""
    return F.embedding_bag(pairs.row.flatten(0, 1), table, per_sample_weights=weight.contiguous(), mode="sum")


def _logits(query: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """Returns the logits of one head, (B * Tq, T): the gradient of (_sums(weight) * query).sum() w.r.t. weight.

    query: (B * Tq, C). table: (rows, C).
    """
    with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        weight = query.new_zeros(len(query), pairs.row.shape[-1], requires_grad=True)
        # torch.autograd.grad would import sympy, which takes a third of a second
        run_backward((_sums(weight, table.detach(), pairs),), (query.detach(),))
    assert weight.grad is not None
    return weight.grad


def _as_it_is(tensor: Tensor) -> Tensor:
    # hides hooks that recompute or offload saved tensors: the hooks must affect only the outer backward
    return tensor


def _table_gradient(weight: Tensor, query: Tensor, pairs: Pairs) -> Tensor:
    """Returns the gradient of the table: (B * Tq, T), (B * Tq, C) -> (rows, C)."""
    pair, of_query, first = pairs.by_row
    return F.embedding_bag(of_query, query, first, per_sample_weights=weight.flatten()[pair], mode="sum")
