"""Task whose model has blocks with dropout and a batch norm, and whose series have many different lengths."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, Task, flag

WIDTH = 4
LONGEST = 17


@dataclass
class RaggedFlags(FlagGroup):
    """Task: series of many lengths"""

    num_train: int = flag(30, "training series", at_least=1)
    dropout: float = flag(0.3, "in the blocks", at_least=0, below=1)
    norm: bool = flag(True, "blocks without batch norm")
    has_blocks: bool = flag(True, "the task names no blocks")


class Series:
    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.length = rng.integers(2, LONGEST + 1, num)
        self.series = rng.normal(size=(num, LONGEST, WIDTH)).astype(np.float32)
        self.series[np.arange(LONGEST) >= self.length[:, None]] = 0

    def __len__(self) -> int:
        return len(self.length)

    def __getitems__(self, keys):
        longest = self.length[keys.index].max()
        return {"series": self.series[keys.index, :longest], "target": self.series[keys.index, 0, 0]}


class Block(nn.Module):
    def __init__(self, dropout: float, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(F.gelu(self.linear(self.norm(x.mT.contiguous()).mT)))


class Model(nn.Module):
    def __init__(self, dropout: float, has_norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout, has_norm) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1)).squeeze(1)


class RaggedObjective(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": F.mse_loss(self.model(batch["series"]), batch["target"], reduction="sum")}


class Ragged(Task):
    Config = RaggedFlags
    monitor = ("val/loss", "min")

    @cached_property
    def _splits(self):
        return {"train": Series(self.config.num_train, 0), "val": Series(9, 1), "test": Series(9, 2)}

    def splits(self):
        return self._splits

    def build_objective(self):
        return RaggedObjective(Model(self.config.dropout, self.config.norm))

    def blocks(self, model):
        return list(model.blocks) if self.config.has_blocks else ()

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}


class AheadOfTime(Ragged):
    """Task for which `--compile` traces forward and backward but generates no kernels."""

    def build_objective(self):
        import trainer.loop.blocks

        trainer.loop.blocks.BACKEND = "aot_eager"
        return super().build_objective()
