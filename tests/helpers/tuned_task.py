"""Tasks that freeze a part of the model for some epochs."""

from contextlib import nullcontext

import torch.nn.functional as F
from torch import nn

from tests.docs.recipes import recipe
from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Shaped
from trainer import Objective

TunedObjective = recipe("Freezing a part for some epochs", Objective=Objective, F=F, nullcontext=nullcontext)["Tuned"]
"""The example in docs/own_task.md."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(NUM_FEATURES, 6), nn.LayerNorm(6), nn.Tanh())
        self.head = nn.Linear(6, NUM_CLASSES)


class Tuned(Shaped):
    defaults = Shaped.defaults | {"weight_decay": 0.1, "max_grad_norm": 0.5}

    def build_objective(self):
        return TunedObjective(Network(), self)


class InBlocks(Tuned):
    """Task whose trunk is a block, which fsdp shards on its own."""

    def blocks(self, model):
        return [model.trunk]


class Thawing(Tuned):
    """Task that freezes the trunk with `requires_grad`."""

    def build_objective(self):
        objective = super().build_objective()
        objective.model.trunk.requires_grad_(False)
        return objective

    def on_epoch_start(self, objective, epoch, progress):
        objective.model.trunk.requires_grad_(epoch >= 2)


class Freezing(Thawing):
    build_objective = Tuned.build_objective
