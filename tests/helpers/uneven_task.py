"""Weighted task in which one rank is slower, as the environment variable LOCKSTEP_SLOW says.

LOCKSTEP_SLOW: "WHERE RANK SECONDS", where WHERE is "data", "forward" or "backward". All ranks sleep for 2 ms in each
forward, and the slow rank sleeps for SECONDS more.
"""

import os
import time

import torch.distributed as dist

from tests.helpers.sleepy_task import Rest, SleepySequences
from tests.helpers.weighted_task import Weighted, WeightedObjective

USUAL_S = 0.002


def own_seconds(where):
    slow_where, rank, seconds = os.environ.get("LOCKSTEP_SLOW", "nowhere 0 0").split()
    is_slow = dist.is_initialized() and where == slow_where and dist.get_rank() == int(rank)
    return float(seconds) if is_slow else 0.0


class UnevenObjective(WeightedObjective):
    def forward(self, batch, phase="train"):
        if self.training:
            time.sleep(USUAL_S + own_seconds("forward"))
        sums = super().forward(batch, phase)
        return {**sums, "loss": Rest.apply(sums["loss"], own_seconds("backward"))} if self.training else sums


class Uneven(Weighted):
    def splits(self):
        train = super().splits()["train"]
        train.__class__ = SleepySequences
        train.seconds = own_seconds("data")
        return super().splits()

    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = UnevenObjective
        return objective
