"""TabICL, version 1 (Qu et al., ICML 2025, arXiv 2502.05564).

Induced set attention (Lee et al., ICML 2019) embeds columns. A transformer over cells, with rotary position embeddings
(Su et al., 2021), embeds rows. A transformer over rows predicts the labels of query rows from labelled context rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.lengths import of_present_classes, within_lengths
from models.tabular.attention import Attention, attend
from models.tabular.normalise import normalise

_ROTARY_BASE = 1e5


class TabICL(nn.Module):
    """Classifies query rows of a table, given labelled context rows.

    The default arguments are the published configuration, which has 27,051,658 parameters. A missing value is replaced
    by its column's mean over context rows. Predictions depend on the order of columns.
    """

    def __init__(
        self,
        width: int = 128,
        num_column_blocks: int = 3,
        num_column_heads: int = 4,
        num_inducing: int = 128,
        num_row_blocks: int = 3,
        num_row_heads: int = 8,
        num_summaries: int = 4,
        num_context_blocks: int = 12,
        num_context_heads: int = 4,
        max_classes: int = 10,
    ) -> None:
        """Creates the model. width: size of a cell embedding, a multiple of num_column_heads and num_row_heads.

        A row embedding has size num_summaries * width, which must be a multiple of num_context_heads.
        """
        super().__init__()
        self.max_classes = max_classes
        self.columns = ColumnEmbedding(width, num_column_blocks, num_column_heads, num_inducing)
        self.rows = RowInteraction(width, num_row_blocks, num_row_heads, num_summaries)
        row_width = width * num_summaries
        self.embed_labels = nn.Linear(max_classes, row_width)
        self.blocks = nn.ModuleList(TransformerBlock(row_width, num_context_heads) for _ in range(num_context_blocks))
        self.decode = nn.Sequential(
            nn.LayerNorm(row_width),
            nn.Linear(row_width, 2 * row_width),
            nn.GELU(),
            nn.Linear(2 * row_width, max_classes),
        )

    def forward(
        self,
        context: Tensor,
        labels: Tensor,
        queries: Tensor,
        num_context: Tensor | None = None,
        num_features: Tensor | None = None,
        num_classes: Tensor | None = None,
    ) -> Tensor:
        """Returns class logits of query rows, (B, Q, max_classes) in at least float32; -inf for classes >= num_classes.

        context: (B, N, m), queries: (B, Q, m); non-finite elements are missing values. labels: (B, N) int64 in [0,
        max_classes). num_context, num_features, num_classes: the count of context rows, features or classes of each
        problem without padding, (B,) int64, at least 1 (default: N, m and max_classes).
        """
        assert labels.shape == context.shape[:2]
        values, _ = normalise(context, queries, num_context)
        return of_present_classes(self.of_normalised(values, labels, num_context, num_features), num_classes)

    def of_normalised(
        self, values: Tensor, labels: Tensor, num_context: Tensor | None, num_features: Tensor | None
    ) -> Tensor:
        """Returns logits, (B, Q, max_classes). values: normalised rows, (B, N + Q, m), context rows first.

        labels: (B, N) int64.
        """
        real = None if num_context is None else within_lengths(num_context, labels.shape[1])[:, None, None]
        rows = self.rows(self.columns(values, labels.shape[1], real), num_features)
        context, queries = rows[:, : labels.shape[1]], rows[:, labels.shape[1] :]
        context = context + self.embed_labels(F.one_hot(labels, self.max_classes).to(context.dtype))
        for block in self.blocks[:-1]:
            context, queries = block(context, context, real), block(queries, context, real)
        return self.decode(self.blocks[-1](queries, context, real))


class TransformerBlock(nn.Module):
    """Pre-norm transformer block for self-attention or cross-attention.

    The block is initially the identity, because the output layers of attention and feed-forward network start at zero.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, bias=True)
        last = nn.Linear(2 * width, width)
        self.feed_forward = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), last)
        for layer in (self.attention.out, last):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, others: Tensor, mask: Tensor | None, rotation: Tensor | None = None) -> Tensor:
        """Lets x (S, T, width) attend to others (S, K, width); returns the new states of x.

        mask: (S, 1, 1, K) bool, False at padding. rotation: cosines and sines for `rotate`, (positions, width / heads /
        2, 2). Positions start at 0 in both `x` and `others`.
        """
        attending = self.norm(x)
        attended = attending if others is x else self.norm(others)
        query, key = self.attention.queries(attending), self.attention.keys(attended)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        x = x + self.attention.merge(attend(query, key, self.attention.values(attended), mask))
        return x + self.feed_forward(x)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Applies rotary position embeddings: rotates pairs of adjacent elements by angles that depend on the position.

    x: (S, T, heads, d). rotation: (positions, d / 2, 2), cosines and sines for at least T positions.
    """
    cosine, sine = rotation[: x.shape[1], None].unbind(-1)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([real * cosine - imaginary * sine, imaginary * cosine + real * sine], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class ColumnEmbedding(nn.Module):
    """Embeds each cell as value * weight + bias; weight and bias depend on the value and the column's context rows."""

    def __init__(self, width: int, num_blocks: int, num_heads: int, num_inducing: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.blocks = nn.ModuleList(InducedBlock(width, num_heads, num_inducing) for _ in range(num_blocks))
        self.weight = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.bias = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))

    def forward(self, values: Tensor, context_rows: int, real: Tensor | None) -> Tensor:
        """Embeds values: (B, T, m) -> (B, T, m, width). real: (B, 1, 1, context_rows) bool, False at padding."""
        size = values.shape[2]
        cells = values.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # (B * m, T, 1)
        mask = None if real is None else real.repeat_interleave(size, dim=0)
        states = self.embed(cells)
        for block in self.blocks:
            states = block(states, context_rows, mask)
        embedded = cells * self.weight(states) + self.bias(states)
        return embedded.unflatten(0, (-1, size)).transpose(1, 2)


class InducedBlock(nn.Module):
    """Lets learned inducing vectors attend to a column's context rows, then lets all rows attend to these vectors."""

    def __init__(self, width: int, num_heads: int, num_inducing: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(nn.init.trunc_normal_(torch.empty(num_inducing, width), std=0.02))
        self.gather = TransformerBlock(width, num_heads)
        self.spread = TransformerBlock(width, num_heads)

    def forward(self, states: Tensor, context_rows: int, mask: Tensor | None) -> Tensor:
        """Returns the new states, (columns, T, width). mask: (columns, 1, 1, context_rows) bool, False at padding."""
        inducing = self.inducing.expand(states.shape[0], -1, -1)
        return self.spread(states, self.gather(inducing, states[:, :context_rows], mask), None)


class RowInteraction(nn.Module):
    """Lets the cells of a row and learned summary tokens attend to each other. The summary tokens represent the row."""

    frequencies: Tensor

    def __init__(self, width: int, num_blocks: int, num_heads: int, num_summaries: int) -> None:
        super().__init__()
        self.summaries = nn.Parameter(nn.init.trunc_normal_(torch.empty(num_summaries, width), std=0.02))
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        size = width // num_heads
        frequencies = 1 / _ROTARY_BASE ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, cells: Tensor, num_features: Tensor | None) -> Tensor:
        """Embeds rows: (B, T, m, width) -> (B, T, num_summaries * width)."""
        num_problems, num_rows, size, _ = cells.shape
        num_summaries = len(self.summaries)
        summaries = self.summaries.expand(num_problems * num_rows, -1, -1)
        tokens = torch.cat([summaries, cells.flatten(0, 1)], dim=1)
        mask = None
        if num_features is not None:
            real = within_lengths(num_summaries + num_features, num_summaries + size)
            mask = real[:, None, None].repeat_interleave(num_rows, dim=0)
        rotation = self.rotation(num_summaries + size)
        for block in self.blocks[:-1]:
            tokens = block(tokens, tokens, mask, rotation)
        summaries = self.blocks[-1](tokens[:, :num_summaries], tokens, mask, rotation)
        return self.norm(summaries).view(num_problems, num_rows, -1)

    def rotation(self, num_positions: int) -> Tensor:
        """Returns the cosines and sines of each position's rotation angles: (positions, width / heads / 2, 2)."""
        position = torch.arange(num_positions, device=self.frequencies.device, dtype=self.frequencies.dtype)
        angles = position[:, None] * self.frequencies
        return torch.stack([angles.cos(), angles.sin()], dim=-1)
