"""TiSASRec: time interval aware self-attention (Li, Wang and McAuley, WSDM 2020), without its (B, T, T, width) tensors.

With r_ij = min(time_span, |t_i - t_j|) and tables K^P, V^P of positions and K^R, V^R of intervals, the paper's

    logit_ij = Q_i . (K_j + K^P_j + K^R[r_ij]) / sqrt(d)        (equation 8)
    out_i    = sum_j a_ij (V_j + V^P_j + V^R[r_ij])             (equation 6)

looks up K^R and V^R for every pair. But Q_i . K^R[r] is a matrix product S with the small table, of which each pair
picks one number, S[i, r_ij]; and sum_j a_ij V^R[r_ij] is W V^R, where W[i, r] adds up the attention of the keys at
interval r. Both are exact, and the largest tensors are (B, heads, T, time_span + 1) and (B, heads, T, T).

Dropout on intervals acts on the entries of the tables, once a forward, instead of on every pair's copy of them.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from models.dropout import Dropout
from models.sasrec import (
    Projections,
    SequentialRecommender,
    causal_mask,
    initialise,
    masked_softmax,
    merge_heads,
    residuals,
    rows,
)


class IntervalAttention(nn.Module):
    """Causal attention to items, their positions and the time between them and the query's item."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.projections = Projections(width, num_heads)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        query_input: Tensor,
        context: Tensor,
        buckets: Tensor,
        position_keys: Tensor,
        position_values: Tensor,
        interval_keys: Tensor,
        interval_values: Tensor,
        last: Tensor | None = None,
    ) -> Tensor:
        """(B, Tq, width) queries over (B, T, width) -> (B, Tq, width); Tq is 1 if `last` is given, else T.

        buckets: (B, T, T) int64, r_ij.
        position_keys, position_values: (B, T, width), of each item's position.
        interval_keys, interval_values: (time_span + 1, width), the tables.
        """
        split = self.projections.split
        query, key, value = self.projections(query_input, context)
        key = key + split(position_keys)
        value = value + split(position_values)
        bucket = rows(buckets, last).unsqueeze(1).expand(-1, query.shape[1], -1, -1)

        of_interval = query @ split(interval_keys).transpose(-2, -1)
        logits = (query @ key.transpose(-2, -1) + of_interval.gather(-1, bucket)) / math.sqrt(query.shape[-1])
        visible = causal_mask(context.shape[1], last, context.device)
        attention = self.dropout(masked_softmax(logits, visible))

        to_interval = attention.new_zeros(*attention.shape[:-1], len(interval_values))
        to_interval = to_interval.scatter_add(-1, bucket, attention)
        return merge_heads(attention @ value + to_interval @ split(interval_values))


class TiSASRec(SequentialRecommender):
    """Positions and intervals enter as keys and values of the attention, shared by all blocks; not into the input."""

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
        """time_span: the longest interval that is told from longer ones, in units of scaled time, at least 1.

        connections: see SequentialRecommender; by default plain residuals in the original order.
        """
        attentions = [IntervalAttention(width, num_heads, dropout) for _ in range(num_blocks)]
        super().__init__(num_items, maxlen, width, dropout, attentions, connections or residuals(width, num_blocks))
        self.time_span = time_span
        self.position_keys = nn.Embedding(maxlen, width)
        self.position_values = nn.Embedding(maxlen, width)
        self.interval_keys = nn.Embedding(time_span + 1, width)
        self.interval_values = nn.Embedding(time_span + 1, width)
        initialise(self)

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """times: (B, T) integers, in units of the user's smallest gap, so that intervals are comparable."""
        if times is None:
            raise ValueError("TiSASRec needs the times of the items")
        position = self.positions(items, length)
        return self.dropout(self.embed_items(items)), (
            self.buckets(times),
            self.dropout(self.position_keys(position)),
            self.dropout(self.position_values(position)),
            self.dropout(self.interval_keys.weight),
            self.dropout(self.interval_values.weight),
        )

    def buckets(self, times: Tensor) -> Tensor:
        """r_ij = min(time_span, |t_i - t_j|): (B, T) -> (B, T, T) int64."""
        return (times.unsqueeze(2) - times.unsqueeze(1)).abs_().clamp_(max=self.time_span).long()
