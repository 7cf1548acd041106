"""Tasks with several phases: a GAN with alternating phases, and two consecutive phases that share a layer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, Task, flag, normal

WIDTH = 3


@dataclass
class PhasedFlags(FlagGroup):
    """Task: several phases"""

    gen_steps: int = flag(1, "steps of the generator for one of the discriminator", at_least=1)
    frozen: bool = flag(False, "a layer that nothing trains")


class Points:
    """Data set of points. x: coordinates of a point. z: noise, drawn again in each epoch."""

    def __init__(self, num: int, seed: int) -> None:
        self.x = np.random.default_rng(seed).normal(size=(num, WIDTH))
        self.seed = seed

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, keys):
        noise = normal(self.seed, keys.epoch, keys.index, (WIDTH,)).astype(np.float64)
        return {"x": self.x[keys.index], "z": noise}


class GanModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.disc = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))


class GanObjective(Objective):
    def forward(self, batch, phase="train"):
        fake = self.model.disc(self.model.gen(batch["z"]))
        if not self.training:
            return {"score": fake.sum()}
        if phase == "gen":
            return {"loss": F.softplus(-fake).sum(), "fooled": (fake > 0).sum()}
        real = self.model.disc(batch["x"])
        return {"loss": (F.softplus(-real) + F.softplus(fake)).sum(), "right": (real > 0).sum() + (fake < 0).sum()}


class Phased(Task):
    Config = PhasedFlags

    @cached_property
    def _data(self):
        return {name: Points(size, 7 + i) for i, (name, size) in enumerate(self.sizes.items())}

    def splits(self):
        return {"train": self._data[self.phases[0]], "val": self._data["val"], "test": self._data["val"]}

    def training_data(self, phase):
        return self._data[phase]


class Gan(Phased):
    monitor = ("val/score", "max")
    phases = ("disc", "gen")
    sizes = {"disc": 23, "gen": 17, "val": 5}

    @property
    def turns(self):
        return (1, self.config.gen_steps)

    def build_objective(self):
        return GanObjective(GanModel())

    def param_groups(self, objective, phase):
        return [{"params": getattr(objective.model, phase).parameters(), "weight_decay": 0.0}]

    def summarise(self, sums):
        return {"score": float(sums["score"] / sums["weight"])}


class SharedModel(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 4)
        self.frozen = nn.Linear(4, 4) if frozen else nn.Identity()
        self.heads = nn.ModuleDict({"first": nn.Linear(4, 1), "second": nn.Linear(4, 2)})


class SharedObjective(Objective):
    def forward(self, batch, phase="first"):
        hidden = torch.tanh(self.model.frozen(self.model.trunk(batch["x"])))
        output = self.model.heads[phase](hidden)
        loss = (output - batch["z"][:, : output.shape[1]]).square().sum()
        return {"loss": loss, "num": output.new_tensor(len(output))} if phase == "first" else {"loss": loss}


class Shared(Phased):
    """Task whose second phase doubles the batch size, and trains the shared layer with its own optimizer state."""

    monitor = ("val/loss", "min")
    phases = ("first", "second")
    sizes = {"first": 19, "second": 25, "val": 5}

    def batch_size(self, phase, batch_size):
        return batch_size * 2 if phase == "second" else batch_size

    def build_objective(self):
        return SharedObjective(SharedModel(self.config.frozen))

    def param_groups(self, objective, phase):
        return [{"params": [*objective.model.trunk.parameters(), *objective.model.heads[phase].parameters()]}]

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}
