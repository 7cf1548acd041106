"""Weighted task in which one process of a run is struck once, at one place.

LOCKSTEP_STRIKE: "HOW PLACE RANK TIME", for example "kill optimizer 1 6", which strikes when rank 1 reaches the place
for the sixth time. HOW: kill (SIGKILL), stop (SIGSTOP) or raise. LOCKSTEP_STRIKE_NOTE: file to which the strike writes
the time; no strike occurs if the file exists.
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
        """Replaces a function so that each call reaches the place before or after the function runs."""
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
    """Waits for background writes, because the death of the process would leave the best weights half written."""
    for thread in threading.enumerate():
        if thread.name == background.THREAD_NAME:
            thread.join()


class StruckObjective(WeightedObjective):
    strike: Strike

    def forward(self, batch, phase="train"):
        sums = super().forward(batch, phase)
        if not self.training:
            self.strike.at("evaluation")
        elif float(batch["weight"].sum()) > 0:  # skips the first forward, which is on a placeholder batch
            self.strike.at("forward")
            sums["loss"].register_hook(lambda grad: self.strike.at("backward"))
        return sums


class StepNorm(nn.BatchNorm1d):
    """Batch norm over the time steps of all sequences, whose running statistics change in each forward."""

    def forward(self, hidden):
        return super().forward(hidden.flatten(0, 1)).view_as(hidden)


class Struck(Weighted):
    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = StruckObjective
        strike = objective.strike = Strike()
        # Reached before each message to another rank. At the second message, only one rank has received its message.
        strike.around(distributed_c10d, "isend", "exchange", is_before=True)
        dist.isend = distributed_c10d.isend  # batch_isend_irecv accepts only this function
        # Reached after the weights were updated, and before any record of the step.
        strike.around(Precision, "step", "optimizer", is_before=False)
        strike.around(Distributed, "full_state", "save", is_before=True)
        # Reached after the checkpoint file is complete, and before any other file names it.
        strike.around(directory, "write_checkpoint", "write", is_before=False)
        return objective


class StruckNormed(Struck):
    def build_objective(self):
        objective = super().build_objective()
        layers = objective.model.layers
        layers.insert(1, StepNorm(layers[0].out_features))
        return objective
