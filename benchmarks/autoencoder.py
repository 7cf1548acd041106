"""Task without data files, in which linear layers of any size learn to reproduce random inputs."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from torch import nn

from trainer.config import FlagGroup, flag
from trainer.task import Objective, Task


class Inputs:
    def __init__(self, num: int, width: int) -> None:
        self.num = num
        self.width = width

    def __len__(self) -> int:
        return self.num

    def __getitems__(self, keys):
        draw = np.random.default_rng(keys.index)
        return {"x": draw.normal(size=(len(keys.index), self.width)).astype(np.float32)}


class Reproduction(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": F.mse_loss(self.model(batch["x"]), batch["x"], reduction="none").mean(1).sum()}


@dataclass
class AutoencoderFlags(FlagGroup):
    """Task: an autoencoder"""

    num_train: int = flag(100_000, "training samples", at_least=1)


class Autoencoder(Task):
    """Task that trains num_layers linear layers with (width, width) weights."""

    Config = AutoencoderFlags
    monitor = ("val/loss", "min")
    width: ClassVar[int]
    num_layers: ClassVar[int]

    def splits(self):
        sizes = {"train": self.config.num_train, "val": 1, "test": 1}
        return {name: Inputs(size, self.width) for name, size in sizes.items()}

    def build_model(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(self.width, self.width, bias=False) for _ in range(self.num_layers)])

    def build_objective(self):
        return Reproduction(self.build_model())

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}
