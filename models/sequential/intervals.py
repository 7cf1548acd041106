"""Products with a table of one row per interval, looked up by each (query, key) pair.

Attention to intervals needs, for query i and key j whose interval has the row r_ij of the table,

    logits_ij = query_i . table[r_ij]             (interval_logits)
    sums_i    = sum_j weight_ij table[r_ij]       (interval_sums)

without storing the (B, Tq, T, width) looked-up rows. Either the queries are multiplied by the whole table, from which
each pair picks a number, and the weights of keys at one interval are added before they are multiplied by the table: two
matrix products, and tensors of (B, heads, Tq, rows). Or, on a CPU where the table has many more rows than there are
keys, so that most of these products would be wasted, both are embedding bags (torch.nn.functional.embedding_bag). Each
is the derivative of the other, and

    table_gradient_r = sum over the pairs of row r of weight_ij query_i

is a bag again, of pairs in the order of their rows. All are exact.
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
"""Rows per key at which both forms are equally fast, in training and inference, for 25 to 200 keys."""


class Pairs:
    """The table row looked up by each (query, key) pair."""

    def __init__(self, row: Tensor, num_rows: int) -> None:
        """row: (B, Tq, T) int64 in [0, num_rows)."""
        self.row = row
        self.num_rows = num_rows

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all pairs sorted by row: their indices, their queries' indices, and each row's first pair."""
        row, pair = self.row.flatten().sort(stable=True)
        first = torch.searchsorted(row, torch.arange(self.num_rows))
        return pair, pair // self.row.shape[-1], first


def interval_logits(query: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """Returns query_i . table[r_ij] by head: (B, heads, Tq, C) and (heads, rows, C) -> (B, heads, Tq, T)."""
    if _in_bags(pairs):
        return _by_head(_Logits, query, table, pairs)
    row = pairs.row.unsqueeze(1).expand(-1, query.shape[1], -1, -1)
    return torch.einsum("bhic,hrc->bhir", query, table).gather(-1, row)


def interval_sums(weight: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """Returns sum_j weight_ij table[r_ij] by head: (B, heads, Tq, T) and (heads, rows, C) -> (B, heads, Tq, C)."""
    if _in_bags(pairs):
        return _by_head(_Sums, weight, table, pairs)
    row = pairs.row.unsqueeze(1).expand(-1, weight.shape[1], -1, -1)
    by_row = weight.new_zeros(*weight.shape[:-1], pairs.num_rows).scatter_add_(-1, row, weight)
    # `@` would copy the table for every row of the batch
    return torch.einsum("bhir,hrc->bhic", by_row, table)


def _in_bags(pairs: Pairs) -> bool:
    # the logits are computed as a derivative, which inference_mode lacks
    if pairs.row.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return pairs.num_rows > _ROWS_PER_KEY * pairs.row.shape[-1]


def _by_head(product: Any, x: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    heads = zip(x.unbind(1), table, strict=True)
    return torch.stack([product.apply(own, rows, pairs).unflatten(0, own.shape[:2]) for own, rows in heads], dim=1)


class _Logits(torch.autograd.Function):
    """(B, Tq, C), (rows, C) -> (B * Tq, T)."""

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
    """(B, Tq, T), (rows, C) -> (B * Tq, C)."""

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
    """(B * Tq, T), (rows, C) -> (B * Tq, C)."""
    return F.embedding_bag(pairs.row.flatten(0, 1), table, per_sample_weights=weight.contiguous(), mode="sum")


def _logits(query: Tensor, table: Tensor, pairs: Pairs) -> Tensor:
    """(B * Tq, C), (rows, C) -> (B * Tq, T): the derivative of `_sums` by the weights in the direction of `query`."""
    with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        weight = query.new_zeros(len(query), pairs.row.shape[-1], requires_grad=True)
        # torch.autograd.grad would import sympy, a third of a second
        run_backward((_sums(weight, table.detach(), pairs),), (query.detach(),))
    assert weight.grad is not None
    return weight.grad


def _as_it_is(tensor: Tensor) -> Tensor:
    # Hooks that recompute or offload saved tensors belong to the outer backward.
    return tensor


def _table_gradient(weight: Tensor, query: Tensor, pairs: Pairs) -> Tensor:
    """(B * Tq, T), (B * Tq, C) -> (rows, C)."""
    pair, of_query, first = pairs.by_row
    return F.embedding_bag(of_query, query, first, per_sample_weights=weight.flatten()[pair], mode="sum")
