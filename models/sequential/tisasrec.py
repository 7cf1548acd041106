"""TiSASRec: time interval aware self-attention (Li, Wang and McAuley, WSDM 2020), without (B, T, T, width) tensors.

With r_ij = min(time_span, |t_i - t_j|), and tables K^P, V^P of positions and K^R, V^R of intervals, the paper defines

    logit_ij = Q_i . (K_j + K^P_j + K^R[r_ij]) / sqrt(d)        (equation 8)
    out_i    = sum_j a_ij (V_j + V^P_j + V^R[r_ij])             (equation 6)

which look up K^R and V^R for each pair. models.sequential.intervals computes the sums without storing looked-up rows.

Dropout applies once per forward pass to the interval tables, not to the rows that each pair looks up.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from models.layers.dropout import Dropout
from models.sequential.intervals import Pairs, interval_logits, interval_sums
from models.sequential.sasrec import (
    Projections,
    SequentialRecommender,
    causal_chunks,
    causal_parts,
    causal_softmax,
    initialise,
    last_softmax,
    merge_heads,
    residuals,
    rows,
)


class Intervals:
    """Intervals r_ij = min(time_span, |t_i - t_j|) between the items of each history, shared by all blocks."""

    def __init__(self, times: Tensor, time_span: int) -> None:
        """Stores the times, (B, T) integers."""
        self.times = times
        self.time_span = time_span

    @property
    def chunks(self) -> list[Pairs]:
        """Returns the (query, key) pairs of each query range of `causal_chunks`."""
        return self._of_chunks() if torch.compiler.is_compiling() else self._kept

    @cached_property
    def _kept(self) -> list[Pairs]:
        return self._of_chunks()

    def _of_chunks(self) -> list[Pairs]:
        times = self.times
        parts = causal_chunks(times.shape[1], times.device)
        return [self.pairs(times[:, start:stop], times[:, :stop]) for start, stop in parts]

    def of_last(self, last: Tensor) -> Pairs:
        """Returns the pairs of all keys with the query at time step last[b] of each history b."""
        return self.pairs(rows(self.times, last), self.times)

    def pairs(self, queries: Tensor, keys: Tensor) -> Pairs:
        """Returns all (query, key) pairs. queries: times of queries, (B, Tq). keys: times of keys, (B, T)."""
        interval = (queries.unsqueeze(2) - keys.unsqueeze(1)).abs_().clamp_(max=self.time_span)
        return Pairs(interval.long(), self.time_span + 1)


class IntervalAttention(nn.Module):
    """Computes causal attention whose keys and values depend on items, positions and the time between two items."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.projections = Projections(width, num_heads)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        query_input: Tensor,
        context: Tensor,
        intervals: Intervals,
        position_keys: Tensor,
        position_values: Tensor,
        interval_keys: Tensor,
        interval_values: Tensor,
        last: Tensor | None = None,
    ) -> Tensor:
        """Lets queries (B, Tq, width) attend to context (B, T, width). Tq is 1 if `last` is given, else T.

        position_keys, position_values: (B, T, width), embeddings of each item's position. interval_keys,
        interval_values: (time_span + 1, width), tables of interval embeddings.
        """
        split = self.projections.split
        interval_keys, interval_values = split(interval_keys), split(interval_values)
        if last is not None:
            query, pairs = self.projections.scaled_query(query_input), intervals.of_last(last)
            logits = self.projections.score(query, context) + query @ split(position_keys).transpose(-2, -1)
            attention = self.dropout(last_softmax(logits + interval_logits(query, interval_keys, pairs), last))
            out = self.projections.pool(attention, context) + attention @ split(position_values)
            return merge_heads(out + interval_sums(attention, interval_values, pairs))

        query, key, value = self.projections(query_input, context)
        key, value = key + split(position_keys), value + split(position_values)
        parts = []
        for pairs, (part, stop) in zip(intervals.chunks, causal_parts(query), strict=True):
            logits = part @ key[:, :, :stop].transpose(-2, -1) + interval_logits(part, interval_keys, pairs)
            attention = self.dropout(causal_softmax(logits))
            parts.append(attention @ value[:, :, :stop] + interval_sums(attention, interval_values, pairs))
        return merge_heads(torch.cat(parts, dim=2))


class TiSASRec(SequentialRecommender):
    """SASRec with embeddings of positions and intervals in the keys and values of all blocks, not in the input."""

    def __init__(
        self,
        num_items: int,
        maxlen: int = 50,
        width: int = 50,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.2,
        time_span: int = 256,
        connections: Sequence[nn.Module] | None = None,
    ) -> None:
        """Creates the model. time_span: maximum interval, at least 1; longer intervals are shortened to it.

        connections: two per block (default: `Residual` of order "original").
        """
        attentions = [IntervalAttention(width, num_heads, dropout) for _ in range(num_blocks)]
        super().__init__(num_items, maxlen, width, dropout, attentions, connections or residuals(width, num_blocks))
        self.time_span = time_span
        self.position_keys = nn.Embedding(maxlen, width)
        self.position_values = nn.Embedding(maxlen, width)
        self.interval_keys = nn.Embedding(time_span + 1, width)
        self.interval_values = nn.Embedding(time_span + 1, width)
        initialise(self)

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns the blocks' inputs. times: (B, T) integers, in units of the user's shortest non-zero interval."""
        if times is None:
            raise ValueError("TiSASRec needs the times of the items; pass `times`")
        position = self.positions(items, length)
        return self.dropout(self.item_scale * self.items(items)), (
            Intervals(times, self.time_span),
            self.dropout(self.position_keys(position)),
            self.dropout(self.position_values(position)),
            self.dropout(self.interval_keys.weight),
            self.dropout(self.interval_values.weight),
        )
