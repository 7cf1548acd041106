"""SASRec: self-attentive sequential recommendation (Kang and McAuley, ICDM 2018), and its relatives' common parts.

Histories are left-aligned: real items first, then zeros. Attention is causal, so real items never see the padding and
no padding mask is needed. Positions count from the end, as in the left-padded original: every history's last item has
the last position.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.dropout import Dropout

NormOrder = Literal["original", "pre", "post"]
Sublayer = Callable[[Tensor, Tensor], Tensor]
"""(query input, context) -> update of the residual stream; the feed-forward sub-layer ignores the context."""

NORM_EPS = 1e-8
_CHUNK_STEPS = 50


class Residual(nn.Module):
    """A residual connection around a sub-layer F(query input, context), with its LayerNorm.

    original: n = norm(x); n + F(n, x), as in the SASRec paper's code: the stream itself is normalised.
    pre: x + F(norm(x), norm(x)).
    post: norm(x + F(x, x)).
    """

    def __init__(self, width: int, order: NormOrder) -> None:
        super().__init__()
        self.order = order
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, x: Tensor, sublayer: Sublayer, last: Tensor | None = None) -> Tensor:
        """x: (B, T, width) -> the same shape, or (B, 1, width) with `last` (see `rows`)."""
        here = rows(x, last)
        if self.order == "original":
            query = self.norm(here)
            return query + sublayer(query, x)
        if self.order == "post":
            return self.norm(here + sublayer(here, x))
        normalised = self.norm(x)
        return here + sublayer(rows(normalised, last), normalised)


def rows(x: Tensor, last: Tensor | None) -> Tensor:
    """Selects time step last[b] of every b: (B, T, ...) -> (B, 1, ...); all of x for None.

    Only the state after the last item predicts the next one, so the last block needs no other query.
    """
    return x if last is None else x[torch.arange(x.shape[0], device=x.device), last].unsqueeze(1)


def causal_chunks(num_steps: int, device: torch.device) -> list[tuple[int, int]]:
    """Returns ranges of query time steps, processed in turn on a CPU.

    Queries of a range see no key beyond its end, which saves a good third of all pairs. A GPU prefers few large
    kernels, and an exported program any number of steps: there it is one range.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return [(0, num_steps)]
    return [(start, min(start + _CHUNK_STEPS, num_steps)) for start in range(0, num_steps, _CHUNK_STEPS)]


def causal_parts(query: Tensor) -> list[tuple[Tensor, int]]:
    """Splits queries into `causal_chunks`, with each range's end. query: (B, heads, T, width / heads).

    Uses split, whose gradient is concatenated once; gradients of slices would be zero-padded and added.
    """
    chunks = causal_chunks(query.shape[2], query.device)
    parts = query.split([stop - start for start, stop in chunks], dim=2)
    return [(part, stop) for part, (_, stop) in zip(parts, chunks, strict=True)]


def causal_softmax(logits: Tensor) -> Tensor:
    """Applies softmax for Tq queries, the last of T time steps, over keys up to their own: (..., Tq, T).

    Changes the logits in place.
    """
    num_queries, num_keys = logits.shape[-2:]
    hidden = logits.new_full((num_queries, num_keys), -math.inf).triu_(num_keys - num_queries + 1)
    return logits.add_(hidden).softmax(dim=-1)  # adding is cheaper than filling


def last_softmax(logits: Tensor, last: Tensor) -> Tensor:
    """Applies softmax for one query per row, (B, heads, 1, T), over keys up to time step last[b]."""
    behind = torch.arange(logits.shape[-1], device=logits.device) > last.view(-1, 1, 1, 1)
    return logits.masked_fill(behind, -math.inf).softmax(dim=-1)


class FeedForward(nn.Module):
    """Two layers of equal width with ReLU: the kernel-size-1 convolutions of the paper's code."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), Dropout(dropout), nn.ReLU(), nn.Linear(width, width), Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Projections(nn.Module):
    """Queries, keys and values by head. Keys have no bias: softmax ignores it, so its true gradient is zero."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)

    def forward(self, query_input: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, width) twice -> queries, divided by sqrt(width / heads), keys and values.

        Each is (B, heads, T, width / heads).
        """
        return self.scaled_query(query_input), self.split(self.key(context)), self.split(self.value(context))

    def scaled_query(self, query_input: Tensor) -> Tensor:
        """(B, T, width) -> (B, heads, T, width / heads)."""
        scale = (self.num_heads / query_input.shape[-1]) ** 0.5  # scales the weights, which are fewer than the queries
        return self.split(F.linear(query_input, self.query.weight * scale, self.query.bias * scale))

    def score(self, query: Tensor, context: Tensor) -> Tensor:
        """Returns one query's products with all keys without computing these: q . (W c) = (W^T q) . c.

        query: (B, heads, 1, width / heads). context: (B, T, width). Returns (B, heads, 1, T).
        """
        by_head = self.key.weight.unflatten(0, (self.num_heads, -1))
        return query @ by_head @ context.unsqueeze(1).transpose(-2, -1)

    def pool(self, attention: Tensor, context: Tensor) -> Tensor:
        """Returns the values weighted by one query's attention, without computing all values.

        attention: (B, heads, 1, T). context: (B, T, width). Returns (B, heads, 1, width / heads).
        """
        by_head = self.value.weight.unflatten(0, (self.num_heads, -1))
        bias = self.value.bias.unflatten(0, (self.num_heads, 1, -1))
        pooled = attention @ context.unsqueeze(1) @ by_head.transpose(-2, -1)
        return pooled + attention.sum(-1, keepdim=True) * bias

    def split(self, x: Tensor) -> Tensor:
        """(..., T, width) -> (..., heads, T, width / heads)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, T, width / heads) -> (B, T, width)."""
    return x.transpose(1, 2).flatten(2)


class CausalAttention(nn.Module):
    """Scaled dot-product attention to items up to the query's own, without an output projection, as published."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.projections = Projections(width, num_heads)
        self.dropout = Dropout(dropout)

    def forward(self, query_input: Tensor, context: Tensor, last: Tensor | None = None) -> Tensor:
        if last is not None:
            query = self.projections.scaled_query(query_input)
            attention = self.dropout(last_softmax(self.projections.score(query, context), last))
            return merge_heads(self.projections.pool(attention, context))
        query, key, value = self.projections(query_input, context)
        if query.device.type != "cpu":
            p = self.dropout.p if self.training else 0.0
            return merge_heads(F.scaled_dot_product_attention(query, key, value, None, p, is_causal=True, scale=1))
        # for these lengths torch's fused attention is slower on a CPU than matrix products
        parts = []
        for part, stop in causal_parts(query):
            logits = part @ key[:, :, :stop].transpose(-2, -1)
            attention = self.dropout(causal_softmax(logits))
            parts.append(attention @ value[:, :, :stop])
        return merge_heads(torch.cat(parts, dim=2))


class Block(nn.Module):
    """Attention, then feed-forward, each inside a connection: `Residual`, or a hyper-connection of `mhc`."""

    def __init__(self, attention: nn.Module, feed_forward: FeedForward, connections: Sequence[nn.Module]) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_connection, self.feed_forward_connection = connections

    def forward(self, x: Tensor, *relations: Any, last: Tensor | None = None) -> Tensor:
        """relations: further inputs of the attention."""
        x = self.attention_connection(x, lambda query, context: self.attention(query, context, *relations, last), last)
        return self.feed_forward_connection(x, lambda query, _: self.feed_forward(query))


class SequentialRecommender(nn.Module):
    """Base: item embeddings, blocks and a final norm. Subclasses define the blocks' input.

    num_items: items are 1..num_items; 0 is padding.
    maxlen: longest history, in items.
    attentions: one attention module per block.
    connections: two per block, around attention and feed-forward layer.
    """

    def __init__(
        self,
        num_items: int,
        maxlen: int,
        width: int,
        dropout: float,
        attentions: Sequence[nn.Module],
        connections: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.maxlen = maxlen
        self.item_scale = math.sqrt(width)  # factor of item embeddings in the blocks' input, as published
        self.items = nn.Embedding(num_items + 1, width, padding_idx=0)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(attention, FeedForward(width, dropout), connections[2 * i : 2 * i + 2])
            for i, attention in enumerate(attentions)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, items: Tensor, length: Tensor, times: Tensor | None = None) -> Tensor:
        """Scores every item as the next one: (B, num_items + 1); padding item 0 scores -inf.

        items: (B, T) int64, T <= maxlen, each history from oldest to newest, then zeros. length: (B,) int64, real
        items, at least 1. times: (B, T) integers, scaled times of models.sequential.tisasrec; ignored by models without
        time.
        """
        states = self.encode(items, length, times, only_last=True)[:, 0]
        table = self.items.weight
        with torch.autocast(table.device.type, enabled=False):  # bfloat16 scores would have many ties
            scores = states.to(table.dtype) @ table.T
        scores[:, 0] = -math.inf
        return scores

    def encode(self, items: Tensor, length: Tensor, times: Tensor | None = None, only_last: bool = False) -> Tensor:
        """Returns the state after every item, (B, T, width), whose dot products with item embeddings are scores.

        only_last: returns only the state after the last item, (B, 1, width), skipping what it does not need.
        """
        if items.shape[1] > self.maxlen:
            raise ValueError(f"histories of {items.shape[1]} items are longer than maxlen {self.maxlen}")
        x, relations = self.embed(items, length, times)
        for block in self.blocks[:-1]:
            x = block(x, *relations)
        x = self.blocks[-1](x, *relations, last=length - 1 if only_last else None)
        return self.norm(x)

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns the blocks' input (B, T, width), and further inputs of their attention."""
        raise NotImplementedError

    def positions(self, items: Tensor, length: Tensor) -> Tensor:
        """Returns positions (B, T) int64 in [0, maxlen), with every history's last item at maxlen - 1."""
        step = torch.arange(items.shape[1], device=items.device)
        return (step + (self.maxlen - length).unsqueeze(1)).clamp(max=self.maxlen - 1)

    def embedding_tables(self) -> list[Tensor]:
        """Returns the tables in an L2 penalty on embeddings."""
        return [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]


class SASRec(SequentialRecommender):
    """x_t = sqrt(width) E[item_t] + P[t], then blocks of causal attention (equations 1 to 5 of the paper)."""

    def __init__(
        self,
        num_items: int,
        maxlen: int = 200,
        width: int = 50,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.2,
        connections: Sequence[nn.Module] | None = None,
    ) -> None:
        """connections: see SequentialRecommender; default: plain residuals in the original order."""
        attentions = [CausalAttention(width, num_heads, dropout) for _ in range(num_blocks)]
        super().__init__(num_items, maxlen, width, dropout, attentions, connections or residuals(width, num_blocks))
        self.position_embedding = nn.Embedding(maxlen, width)
        initialise(self)

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        position = self.position_embedding(self.positions(items, length))
        return self.dropout(torch.add(position, self.items(items), alpha=self.item_scale)), ()


def residuals(width: int, num_blocks: int, order: NormOrder = "original") -> list[Residual]:
    """Creates a model's plain residual connections."""
    return [Residual(width, order) for _ in range(2 * num_blocks)]


def initialise(model: SequentialRecommender) -> None:
    """Initialises embeddings and linear layers by Xavier's normal rule, biases and item row 0 to zero."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        model.items.weight[0] = 0
