"""Weighted task on a device with little memory.

Forward or backward raises torch.OutOfMemoryError for too many samples, on one rank and after a number of forwards.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.poisoned_task import StepNorm
from tests.helpers.weighted_task import Weighted, WeightedFlags, WeightedObjective
from trainer.config import flag


@dataclass
class TightFlags(WeightedFlags):
    """Task: sequences, with little memory"""

    fit: int = flag(1000, "samples that fit into a training forward")
    fit_eval: int = flag(1000, "samples that fit into an evaluation forward")
    tight_rank: int = flag(0, "the rank with little memory")
    roomy_forwards: int = flag(0, "training forwards before memory gets short")
    tight_in: Literal["forward", "backward"] = flag("forward", "where")
    batch_norm: bool = flag(False, "a batch norm before the network")


class NoRoomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")


class TightObjective(WeightedObjective):
    def __init__(self, model, config):
        super().__init__(model, config.delay_s)
        self.config = config
        self.is_tight = config.tight_rank == (dist.get_rank() if dist.is_initialized() else 0)
        self.num_forwards = 0

    def forward(self, batch, phase="train"):
        self.num_forwards += self.training and bool(batch["weight"].any())
        limit = self.config.fit if self.training else self.config.fit_eval
        enough = self.training and self.num_forwards <= self.config.roomy_forwards
        short = self.is_tight and len(batch["weight"]) > limit and not enough
        if short and (self.config.tight_in == "forward" or not self.training):
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        sums = super().forward(batch, phase)
        if short:
            sums["loss"] = NoRoomBackward.apply(sums["loss"])
        return sums


class Tight(Weighted):
    Config = TightFlags

    def build_objective(self):
        network = super().build_objective().model
        model = nn.Sequential(StepNorm(), network) if self.config.batch_norm else network
        return TightObjective(model, self.config)
