"""The task of tests/helpers/weighted_task.py on which one process of a run is struck at one place, once.

LOCKSTEP_STRIKE: "HOW PLACE RANK TIME", for example "kill optimizer 1 6": when rank 1 comes there for the sixth time.
LOCKSTEP_STRIKE_NOTE: a file that is made then, with the time, and keeps it from happening again. How: kill (SIGKILL),
stop (SIGSTOP) or raise.
"""

import os
import signal
import threading
import time
from functools import wraps
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from tests.helpers.weighted_task import Weighted, WeightedObjective
from trainer.checkpoint import background, directory
from trainer.loop.precision import Precision
from trainer.parallel.ddp import Distributed

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Strike:
    def __init__(self) -> None:
        self.how, self.place, rank, number = os.environ["LOCKSTEP_STRIKE"].split()
        self.note = Path(os.environ["LOCKSTEP_STRIKE_NOTE"])
        self.is_here = dist.is_initialized() and dist.get_rank() == int(rank) and not self.note.exists()
        self.left = int(number)

    def at(self, place):
        if not self.is_here or place != self.place:
            return
        self.left -= 1
        if self.left == 0:
            if self.place != "write":
                _await_writes()
            self.note.write_text(str(time.time()))
            if self.how == "raise":
                raise ValueError("the sky fell")
            os.kill(os.getpid(), SIGNALS[self.how])

    def around(self, owner, name, place, is_before):
        """Strikes whenever a function is called, or has done its work."""
        function = getattr(owner, name)

        @wraps(function)
        def struck(*args, **kwargs):
            if is_before:
                self.at(place)
            result = function(*args, **kwargs)
            if not is_before:
                self.at(place)
            return result

        setattr(owner, name, struck)


def _await_writes():
    """Best weights that were only half written would die with the main process, and with them what came after."""
    for thread in threading.enumerate():
        if thread.name == background.THREAD_NAME:
            thread.join()


class StruckObjective(WeightedObjective):
    strike: Strike

    def forward(self, batch, phase="train"):
        sums = super().forward(batch, phase)
        if not self.training:
            self.strike.at("evaluation")
        elif float(batch["weight"].sum()) > 0:  # one that does not count comes first
            self.strike.at("forward")
            sums["loss"].register_hook(lambda grad: self.strike.at("backward"))
        return sums


class StepNorm(nn.BatchNorm1d):
    """Its running statistics change in every forward."""

    def forward(self, hidden):
        return super().forward(hidden.flatten(0, 1)).view_as(hidden)


class Struck(Weighted):
    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = StruckObjective
        strike = objective.strike = Strike()
        # After the first of its messages to the others, which gives one of them alone what it needs for the step.
        strike.around(distributed_c10d, "isend", "exchange", is_before=True)
        dist.isend = distributed_c10d.isend  # a batch of messages takes no other
        # When the weights are those after the step, and nothing says so yet.
        strike.around(Precision, "step", "optimizer", is_before=False)
        strike.around(Distributed, "full_state", "save", is_before=True)
        # When the file is whole, and nothing names it.
        strike.around(directory, "write_checkpoint", "write", is_before=False)
        return objective


class StruckNormed(Struck):
    def build_objective(self):
        objective = super().build_objective()
        layers = objective.model.layers
        layers.insert(1, StepNorm(layers[0].out_features))
        return objective
