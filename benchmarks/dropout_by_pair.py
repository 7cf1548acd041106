"""TiSASRec with dropout on intervals as in the paper: on the elements of every pair's own copy of a table's row.

    python main.py --config configs/seqrec/tisasrec_published.toml --data-dir ml-1m.zip \
        --task benchmarks/dropout_by_pair.py:DropoutByPair

The copies are never made. What their dropout adds to a logit or an output is a sum of many independent terms, and is
drawn as a normal number of the same mean and variance ("fast dropout", Wang and Manning, ICML 2013): the variances,
p / (1 - p) times query_i^2 . K[r_ij]^2 and sum_j attention_ij^2 V[r_ij]^2, are products with intervals too.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.sequential.intervals import Pairs, interval_logits, interval_sums
from models.sequential.sasrec import causal_parts, causal_softmax, merge_heads
from models.sequential.tisasrec import IntervalAttention, Intervals, TiSASRec
from tasks.seqrec import SeqrecObjective, SeqrecTask

_TINY = 1e-12  # at zero the square root has no derivative


class DropoutByPair(SeqrecTask):
    """Plain TiSASRec alone, without hyper-connections."""

    def build_objective(self) -> SeqrecObjective:
        """The usual one, around another model."""
        config = self.config
        size = (self.num_items, config.maxlen, config.hidden_units, config.num_blocks, config.num_heads, config.dropout)
        return SeqrecObjective(TiSASRecDropsByPair(*size, config.time_span), config)


class TiSASRecDropsByPair(TiSASRec):
    """TiSASRec whose tables of intervals reach the attention whole."""

    def __init__(self, *size: Any) -> None:
        """As TiSASRec."""
        super().__init__(*size)
        for block in self.blocks:
            block.attention = AttentionDropsByPair(cast(IntervalAttention, block.attention))

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
        """The usual input of the blocks, and what their attention gets besides."""
        assert times is not None
        position = self.positions(items, length)
        return self.dropout(self.item_scale * self.items(items)), (
            Intervals(times, self.time_span),
            self.dropout(self.position_keys(position)),
            self.dropout(self.position_values(position)),
            self.interval_keys.weight,
            self.interval_values.weight,
        )


class AttentionDropsByPair(IntervalAttention):
    """The usual attention in evaluation; in training products with tables have noise of their own for each pair."""

    def __init__(self, attention: IntervalAttention) -> None:
        nn.Module.__init__(self)
        self.projections, self.dropout = attention.projections, attention.dropout

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
        """See IntervalAttention."""
        if not self.training:
            tables = (position_keys, position_values, interval_keys, interval_values)
            return super().forward(query_input, context, intervals, *tables, last)
        split = self.projections.split
        query, key, value = self.projections(query_input, context)
        key, value = key + split(position_keys), value + split(position_values)
        parts = []
        for pairs, (part, stop) in zip(intervals.chunks, causal_parts(query), strict=True):
            of_intervals = self.noisy(interval_logits, part, split(interval_keys), pairs)
            attention = self.dropout(causal_softmax(part @ key[:, :, :stop].transpose(-2, -1) + of_intervals))
            of_intervals = self.noisy(interval_sums, attention, split(interval_values), pairs)
            parts.append(attention @ value[:, :, :stop] + of_intervals)
        return merge_heads(torch.cat(parts, dim=2))

    def noisy(
        self, product: Callable[[Tensor, Tensor, Pairs], Tensor], x: Tensor, table: Tensor, pairs: Pairs
    ) -> Tensor:
        """The product, with the noise of dropout on the elements of the row that each pair looks up."""
        p = self.dropout.p
        mean = product(x, table, pairs)
        variance = p / (1 - p) * product(x.square(), table.square(), pairs)
        return mean + torch.randn_like(mean) * (variance + _TINY).sqrt()
