"""Task whose model computes one table, with dropout, for all samples of a forward, and once per evaluation."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, Task, flag

NUM_ROWS, WIDTH = 7, 3


@dataclass
class TabledFlags(FlagGroup):
    """Task: rows of a table"""

    own_masks: bool = flag(False, "masks that differ between micro-batches")
    delay: int = flag(0, "where the rows lie", at_least=0)


class Rows:
    def __init__(self, num: int, seed: int) -> None:
        self.target = np.random.default_rng(seed).normal(size=(num, WIDTH))

    def __len__(self):
        return len(self.target)

    def __getitems__(self, keys):
        return {"row": keys.index % NUM_ROWS, "target": self.target[keys.index]}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(NUM_ROWS, WIDTH)

    def forward(self):
        return F.dropout(self.rows.weight, 0.5, self.training)


class TabledObjective(Objective):
    same_masks = True

    def __init__(self, model):
        super().__init__(model)
        self.register_buffer("table", None, persistent=False)
        self.num_starts = 0

    def start_evaluation(self):
        assert not self.training and not torch.is_grad_enabled()
        self.table = self.model()
        self.num_starts += 1

    def train(self, mode=True):
        self.table = None
        return super().train(mode)

    def forward(self, batch, phase="train"):
        table = self.model() if self.training else self.table
        sums = {"loss": (F.embedding(batch["row"], table) - batch["target"]).square().sum()}
        return sums if self.training else sums | {"starts": torch.tensor(float(self.num_starts)) * len(batch["row"])}


class OwnMasks(TabledObjective):
    same_masks = False


class Tabled(Task):
    Config = TabledFlags
    monitor = ("val/loss", "min")
    predict_flags = ("delay",)

    def splits(self):
        return {name: Rows(num, i) for i, (name, num) in enumerate({"train": 23, "val": 9, "test": 11}.items())}

    def build_objective(self):
        return (OwnMasks if self.config.own_masks else TabledObjective)(Table())

    def new_data(self, path):
        return Rows(4, self.config.delay)

    def predictions(self, objective, batch):
        return {"prediction": objective.table[batch["row"], 0].tolist(), "target": batch["target"][:, 0].tolist()}

    def summarise(self, sums):
        return {name: float(sums[name] / sums["weight"]) for name in ("loss", "starts") if name in sums}
