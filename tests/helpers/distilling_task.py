"""Tasks in which a student model learns from a teacher that is neither trained nor saved."""

import os

import torch
import torch.nn.functional as F
from torch import nn

from tests.docs.recipes import recipe
from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Shaped
from trainer import Objective


def loss_of(student, teacher, x, y):
    with torch.no_grad():
        expected = teacher(x).softmax(1)
    logits = student(x)
    return F.cross_entropy(logits, y, reduction="sum") + F.cross_entropy(logits, expected, reduction="sum")


SHOWN = recipe("Helpers", F=F, Objective=Objective)
"""Names defined by the example in docs/own_task.md."""
Distilling = SHOWN["Distilled"]


def teacher(seed=7):
    """Returns a teacher with dropout and batch norm, whose outputs change during and after train mode."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, NUM_CLASSES))


class Distil(Shaped):
    build_objective = SHOWN["build_objective"]

    def build_student(self):
        return self.build()

    def load_teacher(self):
        return teacher(int(os.environ.get("TEACHER", 7)))


class ToDense(nn.Module):
    def forward(self, x):
        return x.to_dense()


class SparseTeacher(nn.Sequential):
    def __init__(self):
        super().__init__(ToDense(), teacher())
        self.register_buffer("scale", torch.eye(NUM_FEATURES).to_sparse())

    def get_extra_state(self):
        return {"version": 1}


class Sparse(Distil):
    """Task with sparse features in its batches, and a teacher with a sparse buffer and an extra state."""

    def collate(self, samples, keys):
        batch = super().collate(samples, keys)
        return batch | {"x": batch["x"].to_sparse()}

    def build(self):
        return nn.Sequential(ToDense(), super().build())

    def load_teacher(self):
        return SparseTeacher()


class Tied(Shaped):
    def build_objective(self):
        student = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        return Distilling(student, helpers={"teacher": student})


class FollowingAfterSteps(Distilling):
    def after_step(self, phase):
        self.helpers["teacher"][0].weight.data.mul_(0.9)


class FollowingInForward(Distilling):
    def forward(self, batch, phase="train"):
        if self.training:
            self.helpers["teacher"][1].running_mean.add_(batch["x"].mean())
        return super().forward(batch, phase)


class AfterSteps(Distil):
    objective = FollowingAfterSteps

    def build_objective(self):
        return self.objective(self.build_student(), helpers={"teacher": self.load_teacher()})


class InForward(AfterSteps):
    objective = FollowingInForward
