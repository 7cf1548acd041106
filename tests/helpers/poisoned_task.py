"""Weighted task with samples that make their optimizer steps non-finite in one epoch."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tests.helpers.weighted_task import Network, Weighted, WeightedFlags, WeightedObjective
from trainer.config import flag


@dataclass
class PoisonedFlags(WeightedFlags):
    """Task: sequences, one of them poisoned"""

    poisoned: tuple[int, ...] | None = flag(None, "samples that are poisoned")
    poisoned_epoch: int = flag(1, "the epoch, counted from 0, in which they are")
    poison: Literal["loss", "flat_loss", "gradient", "input", "absent"] = flag(
        "loss",
        "loss: infinite, as its gradient; flat_loss: infinite with a finite gradient; gradient: that alone; "
        "input: NaN; absent: not poisoned, but without weight",
    )
    batch_norm: bool = flag(False, "a batch norm before the network")


class PoisonedObjective(WeightedObjective):
    def __init__(self, model: nn.Module, config: PoisonedFlags) -> None:
        super().__init__(model, config.delay_s)
        self.poison = config.poison

    def forward(self, batch, phase="train"):
        sums = super().forward(batch, phase)
        in_the_data = self.poison in ("input", "absent")
        if not self.training or in_the_data or not bool(batch["poisoned"].any()):
            return sums
        if self.poison == "loss":
            sums["loss"] = sums["loss"] * torch.inf
        if self.poison == "flat_loss":
            sums["loss"] = sums["loss"] + torch.inf
        if self.poison == "gradient":
            sums["loss"] = sums["loss"] + (sums["loss"] * 0).sqrt()  # 0, whose gradient is 0 / 0
        return sums


class Poisoned(Weighted):
    Config = PoisonedFlags

    def collate(self, samples, keys):
        batch = super().collate(samples, keys)
        chosen = torch.tensor(self.config.poisoned or [], dtype=torch.int64)
        poisoned = torch.isin(batch["index"], chosen) & (batch["epoch"] == self.config.poisoned_epoch)
        batch["poisoned"] = poisoned
        if self.config.poison == "absent":
            batch["weight"] = torch.where(poisoned, 0.0, batch["weight"])
        if self.config.poison == "input" and not keys.placeholder:
            batch["features"] = torch.where(poisoned[:, None, None], torch.nan, batch["features"])
        return batch

    def build_objective(self):
        network = Network(self.config.width, self.config.dropout)
        model = nn.Sequential(StepNorm(), network) if self.config.batch_norm else network
        return PoisonedObjective(model, self.config)


class StepNorm(nn.Module):
    """Batch norm over the time steps of all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, features):
        return self.norm(features.flatten(0, 1)).view(features.shape)


class Descent(torch.optim.Optimizer):
    """Gradient descent, which skips steps on the GPU as docs/own_task.md states."""

    _step_supports_amp_scaling = True
    found_inf = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(torch.where(self.found_inf == 1, p, p - group["lr"] * p.grad))


class PoisonedDescent(Poisoned):
    def build_optimizers(self, phase, groups, lr):
        return [Descent(groups, {"lr": lr})]
