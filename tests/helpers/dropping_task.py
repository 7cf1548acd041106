"""Task that skips layers at random, with a different choice for each process and forward (LayerDrop)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Shaped
from trainer import FlagGroup, Objective, flag

WIDTHS = (3, 5, 8, 13)
"""Numbers of hidden units of the layers, which all differ."""


@dataclass
class DroppingFlags(FlagGroup):
    """Task: points"""

    names_blocks: bool = flag(True, "name the layers as blocks")
    projects: bool = flag(False, "a layer before the blocks, so that the input of the first one needs a gradient")
    penalty: bool = flag(False, "a gradient within the forward")


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(NUM_FEATURES, width), nn.Linear(width, NUM_FEATURES)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """Network with a layer `unused` that no forward uses, so weight decay must not change it either."""

    def __init__(self, projects: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, WIDTHS))
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES) if projects else nn.Identity()
        self.last = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.unused = nn.Linear(NUM_FEATURES, 1)

    def forward(self, x):
        x = self.first(x)
        for layer, is_left_out in zip(self.layers, torch.rand(len(WIDTHS)) < 0.5, strict=True):
            if not (self.training and is_left_out):
                x = layer(x)
        return self.last(x)


class DroppingObjective(Objective):
    penalty = False

    def forward(self, batch, phase="train"):
        x = batch["x"].requires_grad_(self.penalty and self.training)
        logits = self.model(x)
        loss = F.cross_entropy(logits, batch["y"], reduction="sum")
        if x.requires_grad:
            (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
            loss = loss + slope.square().sum()
        return {"loss": loss}


class Dropping(Shaped):
    Config = DroppingFlags

    def build_objective(self):
        objective = DroppingObjective(Network(self.config.projects))
        objective.penalty = self.config.penalty
        return objective

    def blocks(self, model):
        return list(model.layers) if self.config.names_blocks else ()
