"""Tasks for tests of optimizers, which look up, average and classify a few tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.config import FlagGroup, flag
from trainer.task import Objective, Task

NUM_TOKENS, NUM_TRAIN, NUM_CLASSES, WIDTH = 40, 73, 3, 6


@dataclass
class TokenFlags(FlagGroup):
    """Task: tokens"""

    bad_sample: int = flag(-1, "a sample whose loss is infinite")


class Samples:
    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, NUM_TOKENS, (num, 4))
        self.label = self.tokens[:, :2].sum(axis=1) % NUM_CLASSES
        self.count = rng.integers(1, 4, num).astype(np.float32)

    def __len__(self) -> int:
        return len(self.label)

    def __getitems__(self, keys):
        return {name: getattr(self, name)[keys.index] for name in ("tokens", "label", "count")}


class Classifier(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH, sparse=sparse)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens).mean(dim=1))))


class TokenObjective(Objective):
    def __init__(self, model: nn.Module, bad_sample: int) -> None:
        super().__init__(model)
        self.bad_sample = bad_sample

    def forward(self, batch, phase="train"):
        losses = F.cross_entropy(self.model(batch["tokens"]), batch["label"], reduction="none") * batch["count"]
        if self.training and self.bad_sample >= 0:
            losses = torch.where(batch["index"] == self.bad_sample, torch.inf, losses)
        return {"loss": losses.sum()}


class Tokens(Task):
    Config = TokenFlags
    monitor = ("val/loss", "min")
    sparse: ClassVar[bool] = False

    @cached_property
    def _splits(self):
        return {
            name: Samples(size, i) for i, (name, size) in enumerate({"train": NUM_TRAIN, "val": 5, "test": 5}.items())
        }

    def splits(self):
        return self._splits

    def collate(self, samples, keys):
        batch = super().collate(samples, keys)
        batch["weight"] = batch["count"].clone()
        return batch

    def build_objective(self):
        return TokenObjective(Classifier(self.sparse), self.config.bad_sample)

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}


class Sparse(Tokens):
    """Task in which a step uses only a few rows of the embedding."""

    sparse = True

    def param_groups(self, objective, phase):
        rows = objective.model.embedding.weight
        others = [p for p in objective.parameters() if p is not rows]
        return [{"params": others}, {"params": [rows], "weight_decay": 0.0}]


class LayerWise(Tokens):
    """Task with a new head, a trunk with a low learning rate, and a frozen embedding."""

    def param_groups(self, objective, phase):
        model = objective.model
        return [
            {"params": model.head.parameters()},
            {"params": model.hidden.parameters(), "lr_scale": 0.1, "betas": (0.5, 0.9)},
            {"params": model.embedding.parameters(), "lr_scale": 0},
        ]


class OwnOptimizers(Tokens):
    """Task with two of torch's optimizers that no flag supports."""

    def build_optimizers(self, phase, groups, lr):
        matrices, vectors = groups
        return [torch.optim.RMSprop([matrices], lr=lr), torch.optim.Adamax([vectors], lr=lr)]


class OwnSchedule(Tokens):
    def lr_factor(self, step, total):
        return 1 - step / total
