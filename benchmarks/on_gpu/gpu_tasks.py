"""Variants of the tests' tasks for a GPU, with slow kernels or with memory that runs out."""

from dataclasses import dataclass

import torch

from tests.helpers.poisoned_task import Poisoned, PoisonedObjective
from tests.helpers.weighted_task import Weighted, WeightedFlags, WeightedObjective
from trainer.config import flag

LONG_CYCLES = 10_000_000
"""Length of a slow kernel in cycles of the GPU's clock, about 5 ms."""


def keep_busy(device: torch.device, cycles: int = LONG_CYCLES) -> None:
    """Queues a kernel that only takes time, so that code that reads results too early gets wrong values."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


class LateObjective(PoisonedObjective):
    """Objective that makes losses or gradients non-finite on the device, so that the host need not wait."""

    def forward(self, batch, phase="train"):
        if not self.training:
            return super().forward(batch, phase)
        keep_busy(batch["weight"].device)
        sums = WeightedObjective.forward(self, batch, phase)
        is_bad, loss = batch["poisoned"].any(), sums["loss"]
        if self.poison == "loss":
            sums["loss"] = loss * torch.where(is_bad, torch.inf, 1.0)
        if self.poison == "flat_loss":
            sums["loss"] = loss + torch.where(is_bad, torch.inf, 0.0)
        if self.poison == "gradient":
            start = torch.where(is_bad, 0.0, 1.0)  # sqrt has an infinite gradient at 0, and 0 * inf is NaN
            sums["loss"] = loss + (loss * 0 + start).sqrt() - start
        return sums


class LatePoisoned(Poisoned):
    """Task with a slow kernel before each training forward pass, so that the host runs far ahead of the GPU."""

    def build_objective(self):
        return LateObjective(super().build_objective().model, self.config)


@dataclass
class ShrinkingFlags(WeightedFlags):
    """Task: sequences, while other programs take memory"""

    roomy_forwards: int = flag(6, "training forwards before memory gets short")
    left: float = flag(1.0, "share of the GPU's memory that is left then")


class ShrinkingObjective(WeightedObjective):
    def __init__(self, model, config):
        super().__init__(model, config.delay_s)
        self.config, self.num_forwards = config, 0

    def forward(self, batch, phase="train"):
        self.num_forwards += self.training
        if self.num_forwards == self.config.roomy_forwards and batch["weight"].is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(self.config.left)
        return super().forward(batch, phase)


class Shrinking(Weighted):
    """Task that runs out of memory during training, after a successful dry run."""

    Config = ShrinkingFlags

    def build_objective(self):
        return ShrinkingObjective(super().build_objective().model, self.config)
