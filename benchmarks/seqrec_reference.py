"""SASRec and TiSASRec in the form that public PyTorch implementations use: what benchmarks/seqrec.py measures against.

Written anew after the common structure of those programs (pmixer/SASRec.pytorch, pmixer/TiSASRec.pytorch):
nn.MultiheadAttention in (T, B, d) order that returns its averaged weights; intervals as (B, L, L) with their keys and
values looked up to (B, L, L, d), with dropout there; heads by split and cat; convolutions of kernel size 1; padded
positions cut out of the loss by indices; a sampler that builds a row, and rejects negatives, in Python; evaluation
of one user at a time. Rows are padded in front, to the full length. Nothing is slower here than it is there.

Sources of the models: Kang and McAuley 2018, "Self-attentive sequential recommendation"; Li, Wang and McAuley 2020,
"Time interval aware self-attention for sequential recommendation".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LAYER_NORM_EPS = 1e-8


@dataclass(frozen=True)
class Sizes:
    """Of both models; the defaults are those of the published results on MovieLens-1M."""

    num_items: int
    maxlen: int = 200
    width: int = 50
    num_blocks: int = 2
    num_heads: int = 1
    dropout: float = 0.2
    time_span: int = 256


class ConvFeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(sizes.width, sizes.width, kernel_size=1)
        self.dropout1 = nn.Dropout(sizes.dropout)
        self.conv2 = nn.Conv1d(sizes.width, sizes.width, kernel_size=1)
        self.dropout2 = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout1(self.conv1(x.transpose(-1, -2))).relu()
        return x + self.dropout2(self.conv2(hidden)).transpose(-1, -2)


class IntervalAttention(nn.Module):
    """Attention with positions and intervals in keys and values; no output projection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(sizes.width, sizes.width) for _ in range(3))
        self.dropout = nn.Dropout(sizes.dropout)
        self.head_width = sizes.width // sizes.num_heads

    def forward(
        self, queries: Tensor, x: Tensor, is_padding: Tensor, is_future: Tensor,
        positions: tuple[Tensor, Tensor], intervals: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        """queries, x, positions: (B, L, d); intervals: (B, L, L, d); is_padding: (B, L); is_future: (L, L)."""
        batch_size, length = is_padding.shape
        q, k, v = (self.heads(part) for part in (self.q(queries), self.k(x), self.v(x)))
        position_k, position_v = (self.heads(part) for part in positions)
        interval_k, interval_v = (self.heads(part) for part in intervals)
        logits = q.matmul(k.transpose(1, 2))
        logits += q.matmul(position_k.transpose(1, 2))
        logits += interval_k.matmul(q.unsqueeze(-1)).squeeze(-1)
        logits = logits / self.head_width**0.5
        lowest = torch.full_like(logits, torch.finfo(logits.dtype).min)
        num_rows = len(logits)
        hidden_queries = is_padding.repeat(num_rows // batch_size, 1).unsqueeze(-1).expand(-1, -1, length)
        logits = torch.where(hidden_queries, lowest, logits)
        logits = torch.where(is_future.unsqueeze(0).expand(num_rows, -1, -1), lowest, logits)
        weights = self.dropout(torch.softmax(logits, dim=-1))
        out = weights.matmul(v)
        out += weights.matmul(position_v)
        out += weights.unsqueeze(-2).matmul(interval_v).reshape(out.shape)
        return torch.cat(torch.split(out, batch_size, dim=0), dim=2)

    def heads(self, x: Tensor) -> Tensor:
        """(B, ..., d) -> (heads * B, ..., d / heads)."""
        return torch.cat(torch.split(x, self.head_width, dim=-1), dim=0)


class ReferenceModel(nn.Module):
    """What both models share: item table, blocks, and scores against the item table."""

    def __init__(self, sizes: Sizes, make_attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.item_table = nn.Embedding(sizes.num_items + 1, sizes.width, padding_idx=0)
        self.dropout = nn.Dropout(sizes.dropout)
        self.attention_norms = nn.ModuleList()
        self.attentions = nn.ModuleList()
        self.ffn_norms = nn.ModuleList()
        self.ffns = nn.ModuleList()
        for _ in range(sizes.num_blocks):
            self.attention_norms.append(nn.LayerNorm(sizes.width, eps=_LAYER_NORM_EPS))
            self.attentions.append(make_attention())
            self.ffn_norms.append(nn.LayerNorm(sizes.width, eps=_LAYER_NORM_EPS))
            self.ffns.append(ConvFeedForward(sizes))
        self.last_norm = nn.LayerNorm(sizes.width, eps=_LAYER_NORM_EPS)

    def initialise(self) -> None:
        """Xavier-normal matrices; the padding item is zero."""
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.xavier_normal_(parameter)
        with torch.no_grad():
            self.item_table.weight[0] = 0

    def blocks(self) -> Iterator[tuple[nn.Module, nn.Module, nn.Module, nn.Module]]:
        return zip(self.attention_norms, self.attentions, self.ffn_norms, self.ffns, strict=True)

    def hidden(self, items: Tensor, intervals: Tensor | None) -> Tensor:
        """(B, L, d), the last block's output, normalised."""
        raise NotImplementedError

    def forward(
        self, items: np.ndarray, positives: np.ndarray, negatives: np.ndarray, intervals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """items, positives, negatives: (B, L) integers, 0 is padding; intervals: (B, L, L) int64. Two (B, L) scores."""
        hidden = self.hidden(torch.from_numpy(items).long(), intervals)
        positive_rows = self.item_table(torch.from_numpy(positives).long())
        negative_rows = self.item_table(torch.from_numpy(negatives).long())
        return (hidden * positive_rows).sum(dim=-1), (hidden * negative_rows).sum(dim=-1)

    def predict(self, items: np.ndarray, candidates: np.ndarray, intervals: Tensor | None = None) -> Tensor:
        """Scores of candidates (C,) after each row of items (B, L): (B, C)."""
        last = self.hidden(torch.from_numpy(items).long(), intervals)[:, -1]
        return self.item_table(torch.from_numpy(candidates).long()).matmul(last.unsqueeze(-1)).squeeze(-1)


class ReferenceSasRec(ReferenceModel):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, lambda: nn.MultiheadAttention(sizes.width, sizes.num_heads, sizes.dropout))
        self.position_table = nn.Embedding(sizes.maxlen, sizes.width)
        self.initialise()

    def hidden(self, items: Tensor, intervals: Tensor | None) -> Tensor:
        batch_size, length = items.shape
        x = self.item_table(items) * self.item_table.embedding_dim**0.5
        positions = np.tile(np.arange(length), [batch_size, 1])
        x = self.dropout(x + self.position_table(torch.from_numpy(positions)))
        is_item = (items != 0).unsqueeze(-1)
        x = x * is_item
        is_future = ~torch.tril(torch.ones((length, length), dtype=torch.bool))
        for norm, attention, ffn_norm, ffn in self.blocks():
            x = x.transpose(0, 1)
            q = norm(x)
            attended, _ = attention(q, x, x, attn_mask=is_future)
            x = (q + attended).transpose(0, 1)
            x = ffn(ffn_norm(x)) * is_item
        return self.last_norm(x)


class ReferenceTiSasRec(ReferenceModel):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, lambda: IntervalAttention(sizes))
        self.position_tables = nn.ModuleList(nn.Embedding(sizes.maxlen, sizes.width) for _ in range(2))
        self.interval_tables = nn.ModuleList(nn.Embedding(sizes.time_span + 1, sizes.width) for _ in range(2))
        self.initialise()

    def hidden(self, items: Tensor, intervals: Tensor | None) -> Tensor:
        batch_size, length = items.shape
        x = self.dropout(self.item_table(items) * self.item_table.embedding_dim**0.5)
        where = torch.from_numpy(np.tile(np.arange(length), [batch_size, 1]))
        position_rows = tuple(self.dropout(table(where)) for table in self.position_tables)
        interval_rows = tuple(self.dropout(table(intervals)) for table in self.interval_tables)
        is_padding = items == 0
        x = x * ~is_padding.unsqueeze(-1)
        is_future = ~torch.tril(torch.ones((length, length), dtype=torch.bool))
        for norm, attention, ffn_norm, ffn in self.blocks():
            q = norm(x)
            x = q + attention(q, x, is_padding, is_future, position_rows, interval_rows)
            x = ffn(ffn_norm(x)) * ~is_padding.unsqueeze(-1)
        return self.last_norm(x)


def interval_matrix(times: Tensor, time_span: int) -> Tensor:
    """(B, L) scaled times -> (B, L, L) int64 intervals, 0..time_span."""
    times = times.long()
    return (times.unsqueeze(2) - times.unsqueeze(1)).abs().clamp(max=time_span)


def bce_loss(
    model: ReferenceModel, items: np.ndarray, positives: np.ndarray, negatives: np.ndarray,
    intervals: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The mean binary cross-entropy of the real positions: that of the next item plus that of one negative."""
    positive_scores, negative_scores = model(items, positives, negatives, intervals)
    real = np.where(positives != 0)
    loss = F.binary_cross_entropy_with_logits(positive_scores[real], torch.ones_like(positive_scores)[real])
    return loss + F.binary_cross_entropy_with_logits(negative_scores[real], torch.zeros_like(negative_scores)[real])


def training_step(
    model: ReferenceModel, optimizer: torch.optim.Optimizer, items: np.ndarray, positives: np.ndarray,
    negatives: np.ndarray, intervals: Tensor | None = None,
) -> float:  # fmt: skip
    optimizer.zero_grad()
    loss = bce_loss(model, items, positives, negatives, intervals)
    loss.backward()
    optimizer.step()
    return loss.item()


def adam(model: ReferenceModel) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))


class PythonSampler:
    """Builds training batches row by row; a user is drawn anew for every row."""

    def __init__(self, histories: Sequence[list[int]], num_items: int, maxlen: int, seed: int) -> None:
        """histories: each user's training items, in time order."""
        self.histories = histories
        self.num_items = num_items
        self.maxlen = maxlen
        self.random = np.random.RandomState(seed)

    def next_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items, positives and negatives, each (batch_size, maxlen) int32, zeros in front."""
        rows = [self.row() for _ in range(batch_size)]
        items, positives, negatives = zip(*rows, strict=True)
        return np.array(items), np.array(positives), np.array(negatives)

    def row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        user = self.random.randint(0, len(self.histories))
        while len(self.histories[user]) <= 1:
            user = self.random.randint(0, len(self.histories))
        history = self.histories[user]
        items, positives, negatives = (np.zeros([self.maxlen], dtype=np.int32) for _ in range(3))
        seen = set(history)
        following = history[-1]
        where = self.maxlen - 1
        for item in reversed(history[:-1]):
            items[where] = item
            positives[where] = following
            negatives[where] = unseen_item(self.random, self.num_items, seen)
            following = item
            where -= 1
            if where == -1:
                break
        return items, positives, negatives


def unseen_item(random: np.random.RandomState, num_items: int, seen: set[int]) -> int:
    item = random.randint(1, num_items + 1)
    while item in seen:
        item = random.randint(1, num_items + 1)
    return item


@dataclass(frozen=True)
class Query:
    """A user to evaluate.

    items: the history, in time order; times: its scaled times, or None for a model without time.
    target: the item that follows.
    train_items: those that may not be negatives.
    """

    items: list[int]
    times: list[int] | None
    target: int
    train_items: list[int]


@torch.no_grad()
def evaluate_users(
    model: ReferenceModel, users: Sequence[Query], sizes: Sizes, random: np.random.RandomState
) -> tuple[float, float]:
    """HR@10 and NDCG@10 among the target and 100 negatives, one user after the other."""
    hits = ndcg = 0.0
    for user in users:
        items = padded_in_front(user.items, sizes.maxlen)
        intervals = None
        if user.times is not None:
            times = torch.from_numpy(padded_in_front(user.times, sizes.maxlen))
            intervals = interval_matrix(times.unsqueeze(0), sizes.time_span)
        seen = set(user.train_items)
        candidates = [user.target]
        for _ in range(100):
            candidates.append(unseen_item(random, sizes.num_items, seen))
        scores = -model.predict(np.array([items]), np.array(candidates), intervals)[0]
        rank = scores.argsort().argsort()[0].item()
        if rank < 10:
            hits += 1
            ndcg += 1 / np.log2(rank + 2)
    return hits / len(users), ndcg / len(users)


def padded_in_front(values: list[int], width: int) -> np.ndarray:
    row = np.zeros([width], dtype=np.int32)
    where = width - 1
    for value in reversed(values):
        row[where] = value
        where -= 1
        if where == -1:
            break
    return row
