"""Task with everything that could make results depend on the number of devices.

The task has dropout, a batch norm, sample weights with rounding errors, a layer that some forwards skip, a queue and a
counter that forwards update, and optionally two alternating phases.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, PerSample, Task, flag

NUM_FEATURES, NUM_STEPS, WIDTH, NUM_CLASSES = 6, 2, 7, 3


@dataclass
class PartedFlags(FlagGroup):
    """Task: points"""

    num_train: int = flag(53, "training samples", at_least=1)
    dropout: float = flag(0.3, "dropout", at_least=0, below=1)
    wide: int = flag(WIDTH, "hidden units", at_least=1)


class Points:
    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(num, NUM_FEATURES, NUM_STEPS)).astype(np.float32)
        self.label = rng.integers(NUM_CLASSES, size=num)

    def __len__(self) -> int:
        return len(self.label)

    def __getitems__(self, keys):
        return {"x": self.x[keys.index], "label": self.label[keys.index]}


class Net(nn.Module):
    def __init__(self, config: PartedFlags) -> None:
        super().__init__()
        self.first = nn.Conv1d(NUM_FEATURES, config.wide, 1, bias=False)
        self.norm = nn.BatchNorm1d(config.wide)
        self.rare = nn.Linear(config.wide, config.wide)
        self.dropout = nn.Dropout(config.dropout)
        self.last = nn.Linear(config.wide, NUM_CLASSES)
        self.register_buffer("queue", torch.zeros(4, NUM_FEATURES))
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x, has_rare):
        if self.training:
            self.num_forwards += 1
            self.queue.copy_(torch.cat([self.queue[1:], x.detach().float().mean((0, 2))[None]]))
        hidden = self.dropout(torch.tanh(self.norm(self.first(x - 0.01 * self.queue.mean(0)[:, None])))).mean(2)
        if has_rare:
            hidden = hidden + self.rare(hidden)
        return self.last(hidden) / (1 + 0.01 * self.num_forwards)


class PartedObjective(Objective):
    def forward(self, batch, phase="train"):
        has_rare = bool((batch["index"] % 5 == 0).any()) or not self.training
        logits = self.model(batch["x"], has_rare)
        losses = F.cross_entropy(logits.float(), batch["label"], reduction="none") * batch["weight"]
        if phase == "even":
            losses = losses * (batch["label"] != 1)
        hits = logits.argmax(1) == batch["label"]
        sums = {"loss": losses.sum(), "hits": (hits * batch["weight"]).sum()}
        return sums if self.training else {**sums, "logits": PerSample(logits)}


class Parted(Task):
    Config = PartedFlags
    monitor = ("val/loss", "min")

    @cached_property
    def _splits(self):
        sizes = {"train": self.config.num_train, "val": 19, "test": 6}
        return {name: Points(size, 3 + i) for i, (name, size) in enumerate(sizes.items())}

    def splits(self):
        return self._splits

    def collate(self, samples, keys):
        batch = super().collate(samples, keys)
        batch["weight"] = 0.1 + (batch["index"] % 7).float() / 3
        return batch

    def build_objective(self):
        return PartedObjective(Net(self.config))

    def summarise(self, sums):
        found = {"loss": sums["loss"] / sums["weight"], "accuracy": sums["hits"] / sums["weight"]}
        if "logits" in sums:
            found["spread"] = sums["logits"].double().std()
        return {name: float(value) for name, value in found.items()}


class InTurns(Parted):
    phases = ("all", "even")
    turns = (2, 1)
