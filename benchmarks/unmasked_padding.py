"""SASRec as many reproductions train it: attention sees the padding in front of short histories.

    python main.py --config configs/seqrec/sasrec_published.toml --data-dir ml-1m.zip \
        --task benchmarks/unmasked_padding.py:UnmaskedPadding

Padding enters a block as zeros, so its keys and values are the biases of their projections: a place where attention can
go if no item is worth it, once for every empty place. All keys have that bias, to which softmax is blind; without it
the padding's logits are zero.
"""

import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.sequential.sasrec import CausalAttention, SASRec, causal_chunks, merge_heads
from tasks.seqrec import SeqrecObjective, SeqrecTask


class UnmaskedPadding(SeqrecTask):
    """Plain SASRec alone, without times and hyper-connections, on a CPU."""

    def build_objective(self) -> SeqrecObjective:
        """The usual one, around another model."""
        config = self.config
        size = (self.num_items, config.maxlen, config.hidden_units, config.num_blocks, config.num_heads, config.dropout)
        return SeqrecObjective(SASRecSeesPadding(*size), config)


class SASRecSeesPadding(SASRec):
    """SASRec whose blocks are told how many places of each history are empty."""

    def __init__(
        self, num_items: int, maxlen: int, width: int, num_blocks: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__(num_items, maxlen, width, num_blocks, num_heads, dropout)
        for block in self.blocks:
            block.attention = AttentionToPadding(cast(CausalAttention, block.attention))

    def embed(self, items: Tensor, length: Tensor, times: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The usual input of the blocks, and the number of empty places (B,)."""
        return super().embed(items, length, times)[0], (self.maxlen - length,)


class AttentionToPadding(nn.Module):
    """Causal attention with the padding as a further key, which counts once for every empty place.

    Dropout does not apply to it: that of hundreds of equal places is close to none.
    """

    def __init__(self, attention: CausalAttention) -> None:
        super().__init__()
        self.projections, self.dropout = attention.projections, attention.dropout

    def forward(self, query_input: Tensor, context: Tensor, num_empty: Tensor, last: Tensor | None = None) -> Tensor:
        """query_input: (B, Tq, width). context: (B, T, width). num_empty: (B,). Returns (B, Tq, width)."""
        query, key, value = self.projections(query_input, context)
        padding_value = self.projections.value.bias.unflatten(0, (query.shape[1], 1, -1))
        of_padding = num_empty.to(query.dtype).log().view(-1, 1, 1, 1)  # the sum of so many exp(0)
        own = torch.arange(query.shape[2]).unsqueeze(1) if last is None else last.view(-1, 1, 1, 1)
        num_keys, parts = key.shape[2], []
        for start, stop in causal_chunks(num_keys, key.device) if last is None else [(0, num_keys)]:
            here = query[:, :, start:stop]
            hidden = torch.arange(stop) > own[..., start:stop, :]
            logits = (here @ key[:, :, :stop].transpose(-2, -1)).masked_fill(hidden, -torch.inf)
            with_padding = torch.cat([logits, of_padding.expand(*logits.shape[:-1], 1)], dim=-1)
            attention = with_padding.softmax(dim=-1)
            to_items = self.dropout(attention[..., :-1]) @ value[:, :, :stop]
            parts.append(to_items + attention[..., -1:] * padding_value)
        return merge_heads(torch.cat(parts, dim=2))
