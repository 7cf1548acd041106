"""Weighted task that sleeps in data loading, forward and backward, and has memory for a chosen number of samples."""

import time
from dataclasses import dataclass
from functools import cached_property

import torch

from tests.helpers.weighted_task import Sequences, Weighted, WeightedFlags, WeightedObjective
from trainer.config import flag


@dataclass
class SleepyFlags(WeightedFlags):
    """Task: sequences, with rests"""

    data_s: float = flag(0.0, "seconds that every training batch takes to load", at_least=0)
    backward_s: float = flag(0.0, "seconds that every backward sleeps", at_least=0)
    room: int = flag(1000, "samples per forward for which there is memory", at_least=1)


class SleepySequences(Sequences):
    seconds = 0.0

    def __getitems__(self, keys):
        time.sleep(self.seconds)
        return super().__getitems__(keys)


class Rest(torch.autograd.Function):
    """Identity whose backward takes time."""

    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SleepyObjective(WeightedObjective):
    backward_s = 0.0
    room = 0

    def forward(self, batch, phase="train"):
        if len(batch["weight"]) > self.room:
            raise torch.OutOfMemoryError(f"no room for {len(batch['weight'])} samples")
        sums = super().forward(batch, phase)
        return {**sums, "loss": Rest.apply(sums["loss"], self.backward_s)}


class Sleepy(Weighted):
    Config = SleepyFlags

    @cached_property
    def _splits(self):
        train = SleepySequences(self.config.num_train, 100, True)
        train.seconds = self.config.data_s
        return {"train": train, "val": Sequences(self.config.num_val, 101, False), "test": Sequences(2, 102, False)}

    def build_objective(self):
        plain = super().build_objective()
        objective = SleepyObjective(plain.model, plain.delay_s)
        objective.backward_s, objective.room = self.config.backward_s, self.config.room
        return objective
