"""Tasks that use the progress and the scores of the run in the learning rate, after steps and in summaries."""

import math

import torch

from tests.docs.recipes import recipe
from tests.helpers.remembering_task import Pair, PairObjective
from tests.helpers.shaped_task import Shaped

SHOWN = recipe("Where the run is, and its scores", math=math)
"""Names defined by the example in docs/own_task.md."""


class Following(PairObjective):
    def after_step(self, phase, at):
        assert (phase, at.split, at.world_size > at.rank) == ("train", "train", True)
        self.model.follow(share=0.05 * (1 + math.cos(math.pi * at.progress)))


class Moving(Pair):
    @torch.no_grad()
    def follow(self, share):
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(its, share)


class Told(Shaped):
    defaults = Shaped.defaults | {"lr": 0.5, "optimizer": "sgd"}

    def build_objective(self):
        return Following(Moving())

    def initialise(self, objective):
        assert (self.at.step, self.at.num_steps, self.at.progress) == (0, 12, 0.0)
        assert self.at.rank < self.at.world_size <= 2

    def lr_factor(self, step, total):
        assert (step, total) == (self.at.step, self.at.num_steps)
        return SHOWN["lr_factor"](self, step, total)

    def on_epoch_start(self, objective, epoch, progress):
        assert (self.at.epoch, self.at.progress, self.at.phase) == (epoch, epoch / 4, "")

    after_validation = SHOWN["after_validation"]

    def summarise(self, sums):
        return super().summarise(sums) | {f"on_{self.at.split}": 1.0}


class Falling(Shaped):
    """Task whose score gets worse as it learns, from the first epoch on."""

    monitor = ("val/loss", "max")
    defaults = Shaped.defaults | {"lr": 0.5, "optimizer": "sgd"}


class Forgetful(Told):
    def after_validation(self, metrics, state):
        return {"model": self}
