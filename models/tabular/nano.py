"""NanoTabular, a model in which the cells of a table attend to each other across features and across rows.

The architecture follows nanoTabPFN (Pfefferle et al., arXiv 2511.03634), a small TabPFN v2 (Hollmann et al., Nature
2025), but has pre-norm instead of post-norm, and the feature grouping of TabICL v2 (Qu et al., 2026).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.layers.lengths import of_present_classes, within_lengths
from models.tabular.attention import Attention, attend
from models.tabular.normalise import normalise


class Layout(NamedTuple):
    """Layout of the cells of a batch of classification problems.

    All table rows of a batch are in one tensor, (rows, tokens, width): first the context rows of all problems, then all
    query rows.
    """

    num_problems: int
    context_rows: int
    """Number of context rows per problem, including padding."""
    real_tokens: Tensor | None
    """(rows, 1, 1, tokens) bool, False at padding; None if no token is padding."""
    real_context: Tensor | None
    """(num_problems, 1, 1, context_rows) bool, False at padding; None if no context row is padding."""

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Splits x into context rows and query rows."""
        num_context = self.num_problems * self.context_rows
        return x[:num_context], x[num_context:]

    def by_problem(self, x: Tensor) -> Tensor:
        """Groups rows by problem, and treats a row's tokens as attention heads, which do not attend to each other.

        (rows, tokens, heads, d) -> (num_problems, rows per problem, tokens * heads, d).
        """
        return x.flatten(1, 2).unflatten(0, (self.num_problems, -1))


class NanoTabular(nn.Module):
    """Classifies query rows of a table, given labelled context rows.

    A row is a sequence of tokens: one for its label, then one per feature. In query rows, a learned placeholder
    replaces the label. Query rows attend only to context rows.
    """

    shifts: Tensor

    def __init__(
        self,
        width: int = 64,
        num_blocks: int = 3,
        num_heads: int = 4,
        hidden_width: int = 128,
        max_classes: int = 10,
        group_shifts: Sequence[int] = (0, 1, 3),
        num_thinking_rows: int = 0,
    ) -> None:
        """Creates the model. width: size of a token, a multiple of num_heads.

        hidden_width: hidden size of feed-forward layers. group_shifts: token j embeds feature (j + shift) mod m for
        each shift. Several shifts let the model distinguish columns with similar distributions, but make predictions
        depend on the order of columns.
        num_thinking_rows: number of learned rows, to which all rows attend, inserted before the context rows of each
        table (Öztürk et al., arXiv 2606.03681).
        """
        super().__init__()
        self.max_classes = max_classes
        self.register_buffer("shifts", torch.tensor(group_shifts), persistent=False)
        self.embed_cells = nn.Linear(2 * len(group_shifts), width)  # inputs: values and flags for missing values
        self.embed_labels = nn.Embedding(max_classes, width)
        self.no_label = nn.Parameter(torch.zeros(width))
        if num_thinking_rows:
            self.thinking_rows = nn.Parameter(0.5 * torch.randn(num_thinking_rows, width))
        self.num_thinking_rows = num_thinking_rows
        self.blocks = nn.ModuleList(Block(width, num_heads, hidden_width) for _ in range(num_blocks - 1))
        self.last_block = LastBlock(width, num_heads, hidden_width)
        self.decode = nn.Sequential(
            nn.LayerNorm(width, bias=False),
            nn.Linear(width, hidden_width),
            nn.ReLU(),
            nn.Linear(hidden_width, max_classes),
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
        layout = _layout(context, queries, num_context, num_features, self.num_thinking_rows)
        cells = self.embed(context, labels, queries, num_context, num_features)
        if self.num_thinking_rows:
            cells = self._with_thinking_rows(cells, layout)
        for block in self.blocks:
            cells = block(cells, layout)
        decided = self.last_block(cells, layout)
        return of_present_classes(self.decode(decided.view(*queries.shape[:2], -1)), num_classes)

    def embed(
        self, context: Tensor, labels: Tensor, queries: Tensor, num_context: Tensor | None, num_features: Tensor | None
    ) -> Tensor:
        """Returns the tokens of all rows, (B * (N + Q), 1 + m, width)."""
        values, missing = normalise(context, queries, num_context)
        members = self.members(context, num_features).unsqueeze(1).expand(-1, values.shape[1], -1)
        seen = [x.gather(2, members).unflatten(2, (-1, x.shape[2])) for x in (values, missing.to(values.dtype))]
        groups = torch.cat(seen, dim=2).transpose(2, 3)  # (B, N + Q, m, 2 * shifts)
        of_features = self.embed_cells(_in_layout(groups, context.shape[1]))
        no_labels = self.no_label.expand(queries.shape[0] * queries.shape[1], -1)
        of_labels = torch.cat([self.embed_labels(labels).flatten(0, 1), no_labels])
        return torch.cat([of_labels.unsqueeze(1), of_features], dim=1)

    def _with_thinking_rows(self, cells: Tensor, layout: Layout) -> Tensor:
        """Inserts the thinking rows before the context rows of each problem. All tokens of a thinking row are equal."""
        num_context = layout.num_problems * (layout.context_rows - self.num_thinking_rows)
        context, queries = cells[:num_context].unflatten(0, (layout.num_problems, -1)), cells[num_context:]
        thinking = self.thinking_rows.unsqueeze(1).expand(layout.num_problems, -1, cells.shape[1], -1)
        return torch.cat([torch.cat([thinking, context], dim=1).flatten(0, 1), queries])

    def members(self, context: Tensor, num_features: Tensor | None) -> Tensor:
        """Returns the indices of the features that each token embeds, (B, shifts * m) int64.

        The first m indices belong to the first shift, and so on.
        """
        num_problems, _, size = context.shape
        feature = torch.arange(size, device=context.device)
        period = feature.new_full((num_problems,), size) if num_features is None else num_features
        return ((feature + self.shifts.unsqueeze(1)) % period[:, None, None]).flatten(1)


def _layout(
    context: Tensor,
    queries: Tensor,
    num_context: Tensor | None,
    num_features: Tensor | None,
    num_thinking_rows: int = 0,
) -> Layout:
    real_tokens = real_context = None
    context_rows = num_thinking_rows + context.shape[1]
    if num_features is not None:
        of_problem = within_lengths(1 + num_features, 1 + context.shape[2])[:, None, None]
        real_tokens = torch.cat([of_problem.repeat_interleave(n, dim=0) for n in (context_rows, queries.shape[1])])
    if num_context is not None:
        real_context = within_lengths(num_thinking_rows + num_context, context_rows)[:, None, None]
    return Layout(context.shape[0], context_rows, real_tokens, real_context)


def _in_layout(x: Tensor, context_rows: int) -> Tensor:
    """Puts the context rows of all problems before all query rows: (B, N + Q, ...) -> (B * N + B * Q, ...)."""
    return torch.cat([x[:, :context_rows].flatten(0, 1), x[:, context_rows:].flatten(0, 1)])


class Block(nn.Module):
    """Applies attention within each row, attention within each column, and a feed-forward layer."""

    def __init__(self, width: int, num_heads: int, hidden_width: int) -> None:
        super().__init__()
        self.feature_norm = nn.LayerNorm(width, bias=False)
        self.over_features = Attention(width, num_heads)
        self.row_norm = nn.LayerNorm(width, bias=False)
        self.over_rows = Attention(width, num_heads)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width, bias=False),
            nn.Linear(width, hidden_width, bias=False),
            nn.ReLU(),
            nn.Linear(hidden_width, width, bias=False),
        )

    def forward(self, cells: Tensor, layout: Layout) -> Tensor:
        """Returns the new states of all cells, (rows, tokens, width)."""
        x = self.feature_norm(cells)
        cells = cells + self.attend_over_features(x, x, layout)
        context, queries = layout.parts(self.row_norm(cells))
        cells = cells + self.attend_over_rows([context, queries], context, layout)
        return cells + self.feed_forward(cells)

    def attend_over_features(self, x: Tensor, tokens: Tensor, layout: Layout) -> Tensor:
        """Lets x attend to all tokens of the same row. x: (rows, n, width). tokens: (rows, tokens per row, width)."""
        attention = self.over_features
        query, key, value = attention.queries(x), attention.keys(tokens), attention.values(tokens)
        return attention.merge(attend(query, key, value, layout.real_tokens))

    def attend_over_rows(self, parts: Sequence[Tensor], context: Tensor, layout: Layout) -> Tensor:
        """Lets cells attend to the cells of context rows in the same problem and column.

        parts: tensors of context rows or query rows, (rows, tokens, width) each. context: (context rows, tokens,
        width). Returns the concatenated results of all parts.
        """
        attention = self.over_rows
        key, value = (layout.by_problem(x) for x in (attention.keys(context), attention.values(context)))
        attended = []
        for part in parts:
            query = attention.queries(part)
            attended.append(attend(layout.by_problem(query), key, value, layout.real_context).reshape(query.shape))
        return attention.merge(torch.cat(attended))


class LastBlock(Block):
    """Last block of the model, which computes only the label token of each query row."""

    def forward(self, cells: Tensor, layout: Layout) -> Tensor:
        """Returns the label token of each query row: (rows, tokens, width) -> (query rows, 1, width)."""
        x = self.feature_norm(cells)
        labels = cells[:, :1] + self.attend_over_features(x[:, :1], x, layout)
        context, queries = layout.parts(labels)
        queries = queries + self.attend_over_rows([self.row_norm(queries)], self.row_norm(context), layout)
        return queries + self.feed_forward(queries)
