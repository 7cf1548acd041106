"""Task of the comparison, in plain torch: tag every token of sequences of very different lengths.

The loss of a step is the mean over all tokens of the step, which differs from the mean of micro-batch means. All
trainers use the same data, model and optimizers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TOKENS, NUM_TAGS, MAX_LENGTH = 50, 5, 24
IGNORED = -100
"""Tag of padding, which torch's cross entropy ignores by default."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class Settings:
    num_train: int = 203
    num_eval: int = 101
    epochs: int = 2
    micro_batch: int = 4
    accumulate: int = 1
    world: int = 1
    save_every: int = 5
    width: int = 32
    dropout: float = 0.0
    optimizer: str = "sgd"
    lr: float = 0.1
    max_grad_norm: float = 0.0
    dtype: str = "float64"


class Sequences:
    """Data set of tokens and tags, (n, 24) int64, in memory.

    For a DataLoader, it gathers whole batches, which `as_they_are` returns unchanged.
    """

    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.geometric(0.15, num).clip(max=MAX_LENGTH)
        self.tokens = rng.integers(NUM_TOKENS, size=(num, MAX_LENGTH))
        before = np.roll(self.tokens, 1, axis=1)
        before[:, 0] = 0
        self.tags = (self.tokens + before) % NUM_TAGS
        self.tags[np.arange(MAX_LENGTH) >= self.lengths[:, None]] = IGNORED

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([i]).items()}

    def __getitems__(self, index: Sequence[int]) -> dict[str, Tensor]:
        rows = np.asarray(index)
        return {
            "index": torch.from_numpy(rows),
            "tokens": torch.from_numpy(self.tokens[rows]),
            "tags": torch.from_numpy(self.tags[rows]),
        }


def as_they_are(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a batch of `Sequences` unchanged, as the `collate_fn` of a DataLoader."""
    return batch


def train_data(settings: Settings) -> Sequences:
    return Sequences(settings.num_train, seed=1)


def eval_data(settings: Settings) -> Sequences:
    return Sequences(settings.num_eval, seed=2)


class Tagger(nn.Module):
    """Computes each token's scores, (B, 24) -> (B, 24, 5), from its embedding and the mean of embeddings up to it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.hidden = nn.Linear(2 * width, 2 * width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, NUM_TAGS)
        self.register_buffer("counts", torch.arange(1.0, MAX_LENGTH + 1)[:, None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.embedding(tokens)
        before = vectors.cumsum(1) / self.counts
        return self.head(self.dropout(F.gelu(self.hidden(torch.cat([vectors, before], 2)))))


def new_model(settings: Settings) -> Tagger:
    torch.manual_seed(0)
    return Tagger(settings.width, settings.dropout).to(getattr(torch, settings.dtype))


def loss_of(scores: Tensor, tags: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the loss of all tokens except padding: the mean, the sum, or the loss of each token, (B, 24)."""
    losses = F.cross_entropy(scores.flatten(0, 1), tags.flatten(), ignore_index=IGNORED, reduction=reduction)
    return losses.view(tags.shape) if reduction == "none" else losses


def new_optimizer(settings: Settings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=MOMENTUM)
    return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=0.0, fused=True)


# --- exact results ---------------------------------------------------------------------------------------------------


def trained_on(settings: Settings, steps: Iterable[Sequence[int]]) -> Tagger:
    """Returns a model after steps on the given samples, with one batch per step and the mean loss over its tokens."""
    data, model = train_data(settings), new_model(settings)
    optimizer = new_optimizer(settings, model.parameters())
    for index in steps:
        batch = data.__getitems__(index)
        optimizer.zero_grad()
        loss_of(model(batch["tokens"]), batch["tags"]).backward()
        optimizer.step()
    return model


@torch.no_grad()
def scores_of(settings: Settings, weights: dict[str, Tensor]) -> dict[str, float]:
    """Returns loss and accuracy over the tokens of the evaluation set, with every sample once."""
    data, model = eval_data(settings), new_model(settings)
    model.load_state_dict(weights)
    batch = data.__getitems__(range(len(data)))
    scores, counted = model.eval()(batch["tokens"]), batch["tags"] != IGNORED
    hits = (scores.argmax(2) == batch["tags"])[counted].double().mean()
    return {"loss": float(loss_of(scores, batch["tags"])), "accuracy": float(hits), "num_samples": len(data)}
