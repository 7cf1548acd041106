"""SASRec: self-attentive sequential recommendation (Kang and McAuley, ICDM 2018), and a base class for similar models.

Histories are padded with zeros at the end. Attention is causal, so items never attend to padding. The last item of each
history gets the last position, as in the published code, which pads at the start.
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
"""Function that maps (query input, context) to an update of the residual stream; only attention uses the context."""

NORM_EPS = 1e-8
_CHUNK_STEPS = 50


class Residual(nn.Module):
    """Residual connection with LayerNorm around a sub-layer F(query input, context).

    original: n + F(n, x) with n = norm(x), as in the code of the SASRec paper.
    pre: x + F(norm(x), norm(x)).
    post: norm(x + F(x, x)).
    """

    def __init__(self, width: int, order: NormOrder) -> None:
        super().__init__()
        self.order = order
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, x: Tensor, sublayer: Sublayer, last: Tensor | None = None) -> Tensor:
        """Applies the sub-layer: (B, T, width) -> (B, T, width), or (B, 1, width) if `last` is given."""
        here = rows(x, last)
        if self.order == "original":
            query = self.norm(here)
            return query + sublayer(query, x)
        if self.order == "post":
            return self.norm(here + sublayer(here, x))
        normalised = self.norm(x)
        return here + sublayer(rows(normalised, last), normalised)


def rows(x: Tensor, last: Tensor | None) -> Tensor:
    """Selects time step last[b] of each sequence b: (B, T, ...) -> (B, 1, ...). Returns x if `last` is None."""
    return x if last is None else x[torch.arange(x.shape[0], device=x.device), last].unsqueeze(1)


def causal_chunks(num_steps: int, device: torch.device) -> list[tuple[int, int]]:
    """Returns consecutive ranges of query time steps; queries of a range need only the keys up to the range's end.

    On a CPU, splitting into several ranges avoids up to half of all (query, key) pairs. A single range is used on a
    GPU, and in compiled or exported programs.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return [(0, num_steps)]
    return [(start, min(start + _CHUNK_STEPS, num_steps)) for start in range(0, num_steps, _CHUNK_STEPS)]


def causal_parts(query: Tensor) -> list[tuple[Tensor, int]]:
    """Splits queries into `causal_chunks`, and returns (chunk, end) pairs. query: (B, heads, T, width / heads).

    The backward pass of `split` concatenates gradients, which is faster than padding and adding gradients of slices.
    """
    chunks = causal_chunks(query.shape[2], query.device)
    parts = query.split([stop - start for start, stop in chunks], dim=2)
    return [(part, stop) for part, (_, stop) in zip(parts, chunks, strict=True)]


def causal_softmax(logits: Tensor) -> Tensor:
    """Returns the softmax over keys up to each query's time step: (..., Tq, T).

    The queries belong to the last Tq of T time steps. Changes the logits in place.
    """
    num_queries, num_keys = logits.shape[-2:]
    hidden = logits.new_full((num_queries, num_keys), -math.inf).triu_(num_keys - num_queries + 1)
    return logits.add_(hidden).softmax(dim=-1)  # faster than masked_fill_


def last_softmax(logits: Tensor, last: Tensor) -> Tensor:
    """Returns the softmax over keys up to time step last[b] of each sequence b. logits: (B, heads, 1, T)."""
    behind = torch.arange(logits.shape[-1], device=logits.device) > last.view(-1, 1, 1, 1)
    return logits.masked_fill(behind, -math.inf).softmax(dim=-1)


class FeedForward(nn.Module):
    """Applies two linear layers with a ReLU between them (in the paper's code, convolutions of kernel size 1)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), Dropout(dropout), nn.ReLU(), nn.Linear(width, width), Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Projections(nn.Module):
    """Linear layers for queries, keys and values of all heads. Keys have no bias, because softmax would cancel it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)

    def forward(self, query_input: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scaled queries (`scaled_query`), keys and values: (B, heads, T, width / heads) each.

        query_input, context: (B, T, width).
        """
        return self.scaled_query(query_input), self.split(self.key(context)), self.split(self.value(context))

    def scaled_query(self, query_input: Tensor) -> Tensor:
        """Returns queries divided by sqrt(width / heads): (B, T, width) -> (B, heads, T, width / heads)."""
        scale = (self.num_heads / query_input.shape[-1]) ** 0.5  # weights are cheaper to scale than queries
        return self.split(F.linear(query_input, self.query.weight * scale, self.query.bias * scale))

    def score(self, query: Tensor, context: Tensor) -> Tensor:
        """Returns the logits of one query for all keys, (B, heads, 1, T).

        The keys themselves are not computed, because q . (W c) = (W^T q) . c.

        query: (B, heads, 1, width / heads). context: (B, T, width).
        """
        by_head = self.key.weight.unflatten(0, (self.num_heads, -1))
        return query @ by_head @ context.unsqueeze(1).transpose(-2, -1)

    def pool(self, attention: Tensor, context: Tensor) -> Tensor:
        """Returns one query's attention-weighted sum of values, (B, heads, 1, width / heads), without computing values.

        attention: (B, heads, 1, T). context: (B, T, width).
        """
        by_head = self.value.weight.unflatten(0, (self.num_heads, -1))
        bias = self.value.bias.unflatten(0, (self.num_heads, 1, -1))
        pooled = attention @ context.unsqueeze(1) @ by_head.transpose(-2, -1)
        return pooled + attention.sum(-1, keepdim=True) * bias

    def split(self, x: Tensor) -> Tensor:
        """Splits the last dimension into heads: (..., T, width) -> (..., heads, T, width / heads)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """Concatenates heads: (B, heads, T, width / heads) -> (B, T, width)."""
    return x.transpose(1, 2).flatten(2)


class CausalAttention(nn.Module):
    """Computes causal scaled dot-product attention, without an output projection, as published."""

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
        # for usual history lengths, matrix products are faster on a CPU than torch's fused attention
        parts = []
        for part, stop in causal_parts(query):
            logits = part @ key[:, :, :stop].transpose(-2, -1)
            attention = self.dropout(causal_softmax(logits))
            parts.append(attention @ value[:, :, :stop])
        return merge_heads(torch.cat(parts, dim=2))


class Block(nn.Module):
    """Applies attention, then a feed-forward layer, each inside a `Residual` or a `mhc.HyperConnection`."""

    def __init__(self, attention: nn.Module, feed_forward: FeedForward, connections: Sequence[nn.Module]) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_connection, self.feed_forward_connection = connections

    def forward(self, x: Tensor, *relations: Any, last: Tensor | None = None) -> Tensor:
        """Returns all states, or one per sequence b, at step last[b]. relations: more inputs of attention."""
        x = self.attention_connection(x, lambda query, context: self.attention(query, context, *relations, last), last)
        return self.feed_forward_connection(x, lambda query, _: self.feed_forward(query))


class SequentialRecommender(nn.Module):
    """Base class of models with item embeddings, blocks and a final norm. Subclasses define the blocks' input: `embed`.

    num_items: number of items, which are numbered from 1; 0 is padding.
    maxlen: maximum number of items in a history.
    attentions: one attention module per block.
    connections: two per block, around the attention and the feed-forward layer.
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
        self.item_scale = math.sqrt(width)  # factor on item embeddings in the blocks' input, as published
        self.items = nn.Embedding(num_items + 1, width, padding_idx=0)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(attention, FeedForward(width, dropout), connections[2 * i : 2 * i + 2])
            for i, attention in enumerate(attentions)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, items: Tensor, length: Tensor, times: Tensor | None = None) -> Tensor:
        """Returns next-item scores (B, num_items + 1), with -inf for item 0, which is padding.

        items: (B, T) int64, T <= maxlen; each history from oldest to newest, then zeros. length: (B,) int64, number of
        items in each history, at least 1. times: (B, T) integers, used only by TiSASRec.
        """
        states = self.encode(items, length, times, only_last=True)[:, 0]
        table = self.items.weight
        with torch.autocast(table.device.type, enabled=False):  # scores in bfloat16 would have many ties
            scores = states.to(table.dtype) @ table.T
        scores[:, 0] = -math.inf
        return scores

    def encode(self, items: Tensor, length: Tensor, times: Tensor | None = None, only_last: bool = False) -> Tensor:
        """Returns the state after each item, (B, T, width). Scores are dot products of states and item embeddings.

        only_last: whether to compute only the state after the last item, (B, 1, width).
        """
        if items.shape[1] > self.maxlen:
            raise ValueError(f"{items.shape[1]} items exceed maxlen {self.maxlen}; pass only the latest items")
        x, relations = self.embed(items, length, times)
        for block in self.blocks[:-1]:
            x = block(x, *relations)
        x = self.blocks[-1](x, *relations, last=length - 1 if only_last else None)
        return self.norm(x)

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns the input of the blocks, (B, T, width), and additional inputs of their attention."""
        raise NotImplementedError

    def positions(self, items: Tensor, length: Tensor) -> Tensor:
        """Returns positions, (B, T) int64 in [0, maxlen); the last item of each history has position maxlen - 1."""
        step = torch.arange(items.shape[1], device=items.device)
        return (step + (self.maxlen - length).unsqueeze(1)).clamp(max=self.maxlen - 1)

    def embedding_tables(self) -> list[Tensor]:
        """Returns the embedding tables, for an L2 penalty."""
        return [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]


class SASRec(SequentialRecommender):
    """Applies causal attention blocks to scaled item embeddings plus position embeddings (equations 1 to 5)."""

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
        """Creates the model. connections: two per block (default: `Residual` of order "original")."""
        attentions = [CausalAttention(width, num_heads, dropout) for _ in range(num_blocks)]
        super().__init__(num_items, maxlen, width, dropout, attentions, connections or residuals(width, num_blocks))
        self.position_embedding = nn.Embedding(maxlen, width)
        initialise(self)

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        position = self.position_embedding(self.positions(items, length))
        return self.dropout(torch.add(position, self.items(items), alpha=self.item_scale)), ()


def residuals(width: int, num_blocks: int, order: NormOrder = "original") -> list[Residual]:
    """Creates the residual connections of a model, two per block."""
    return [Residual(width, order) for _ in range(2 * num_blocks)]


def initialise(model: SequentialRecommender) -> None:
    """Sets weights and embeddings to Xavier normal values; sets biases and the embedding of item 0 to 0."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        model.items.weight[0] = 0
