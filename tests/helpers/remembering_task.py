"""Models that change more than their trained parameters: buffers in forwards, or a teacher after each step."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Shaped, ShapedObjective

MOMENTUM = 0.9


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, counts its batches, and keeps the last sample in a new tensor.

    The module is not a subclass of torch's batch norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(NUM_FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 1 - MOMENTUM)
            self.num_batches += 1
            self.last = x[-1].clone()
        return self.linear(x - self.mean + 0.1 * self.last)


class Remembering(Shaped):
    def build(self):
        return Centred()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES))
        self.teacher = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(its, 1 - MOMENTUM)


def loss_of(pair, x, y):
    student, teacher = pair.student(x), pair.teacher(x + 0.1)
    return F.cross_entropy(student, y, reduction="sum") + (student - teacher).square().sum()


class PairObjective(ShapedObjective):
    def forward(self, batch, phase="train"):
        return {"loss": loss_of(self.model, batch["x"], batch["y"])}

    def after_step(self, phase):
        self.model.follow()


class MeanTeacher(Shaped):
    def build_objective(self):
        return PairObjective(Pair())


class Eager(PairObjective):
    """Objective that updates the teacher in `forward` instead of after the step."""

    def forward(self, batch, phase="train"):
        if self.training:
            self.model.follow()
        return super().forward(batch, phase)


class TooEager(Shaped):
    def build_objective(self):
        return Eager(Pair())
