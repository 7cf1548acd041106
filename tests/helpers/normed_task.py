"""Task whose model has a batch norm over the samples of a forward and their time steps."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, Task, flag

NUM_FEATURES = 3
WIDTH = 5


@dataclass
class NormedFlags(FlagGroup):
    """Task: short series"""

    num_train: int = flag(13, "training series", at_least=1)
    num_steps: int = flag(3, "steps of a series", at_least=1)


class Series:
    def __init__(self, num: int, num_steps: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.series = rng.normal(2, 3, (num, NUM_FEATURES, num_steps)).astype(np.float32)
        self.targets = self.series.mean((1, 2))

    def __len__(self) -> int:
        return len(self.series)

    def __getitems__(self, keys):
        return {"series": self.series[keys.index], "target": self.targets[keys.index]}


class NormedObjective(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": F.mse_loss(self.model(batch["series"]).mean((1, 2)), batch["target"], reduction="sum")}


class Normed(Task):
    Config = NormedFlags
    monitor = ("val/loss", "min")

    @cached_property
    def _splits(self):
        sizes = {"train": self.config.num_train, "val": 5, "test": 5}
        return {name: Series(size, self.config.num_steps, i) for i, (name, size) in enumerate(sizes.items())}

    def splits(self):
        return self._splits

    def build_objective(self):
        # No bias before the norm: its gradient would be pure rounding error, which AdamW would amplify.
        first, last = nn.Conv1d(NUM_FEATURES, WIDTH, 1, bias=False), nn.Conv1d(WIDTH, 1, 1)
        return NormedObjective(nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Tanh(), last))

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}
