"""Small task on data sets of torch, whose items have new random noise in each epoch."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trainer import FlagGroup, Objective, Task, flag, from_dataset


@dataclass
class LinesFlags(FlagGroup):
    """Task: lines"""

    adapted: bool = flag(True, "through from_dataset")


class Jittered(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(3), y


class Regression(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": (self.model(batch["x"])[:, 0] - batch["y"]).square().sum()}


class Lines(Task):
    Config = LinesFlags
    monitor = ("val/loss", "min")

    def splits(self):
        x = torch.linspace(-1, 1, 63).view(21, 3)
        data = Jittered(x, x.sum(1))
        sizes = {"train": range(15), "val": range(15, 18), "test": range(18, 21)}
        parts = {name: Subset(data, indices) for name, indices in sizes.items()}
        if not self.config.adapted:
            return parts
        return {name: from_dataset(part, seed=self.seed, names=("x", "y")) for name, part in parts.items()}

    def build_objective(self):
        return Regression(nn.Linear(3, 1))

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}
