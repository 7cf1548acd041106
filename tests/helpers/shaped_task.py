"""Task that builds its model by the method `build`, which subclasses replace to test unusual models."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, Task

NUM_FEATURES, NUM_CLASSES = 4, 2


@dataclass
class ShapedFlags(FlagGroup):
    """Task: points"""


class Points:
    def __init__(self, num: int, seed: int) -> None:
        self.x = np.random.default_rng(seed).normal(size=(num, NUM_FEATURES)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, keys):
        x = self.x[keys.index]
        return {"x": x, "y": (x.sum(1) > 0).astype(np.int64)}


class ShapedObjective(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": F.cross_entropy(self.model(batch["x"]), batch["y"], reduction="sum")}


class Shaped(Task):
    Config = ShapedFlags
    monitor = ("val/loss", "min")
    defaults = {"lr": 0.05, "schedule": "constant", "warmup_epochs": 0.0, "max_grad_norm": 0.0, "batch_size": 8}

    def splits(self):
        return {"train": Points(21, 1), "val": Points(8, 2), "test": Points(8, 3)}

    def build_objective(self):
        return ShapedObjective(self.build())

    def build(self) -> nn.Module:
        return nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def summarise(self, sums):
        return {name: float(value / sums["weight"]) for name, value in sums.items() if name != "weight"}


class Plus(nn.Module):
    """Adds the result of a function to the output of a linear layer. tensors: parameters and buffers of this module."""

    def __init__(self, added, **tensors) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.added = added
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.added(self, x)
