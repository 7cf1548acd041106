"""The task of tests/helpers/weighted_task.py on which a fault befalls one rank.

LOCKSTEP_FAULT: "WHAT WHERE RANK", for example "raise forward 1". It happens in the third training batch, or in the
first one of an evaluation.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from tests.helpers.weighted_task import Sequences, Weighted, WeightedObjective
from trainer.loading.errors import BadInput

FAULTY_BATCH = 3


class Fault:
    def __init__(self) -> None:
        self.what, self.where, rank = (os.environ.get("LOCKSTEP_FAULT") or "none nowhere 0").split()
        own_rank = dist.get_rank() if dist.is_initialized() else 0
        self.is_here = own_rank == int(rank)
        self.calls = 0

    def at(self, where):
        if not self.is_here or where != self.where:
            return
        self.calls += 1
        if where == "evaluation" or self.calls == FAULTY_BATCH:
            self.happen()

    def happen(self):
        if self.what == "sleep":
            time.sleep(600)
        elif self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "leave":
            raise SystemExit(130)
        elif self.what == "refuse":
            raise BadInput("the data ran away")
        else:
            if self.what == "linger":
                leave_thread_in_cpp()
            raise ValueError("the sky fell")


class SlowEnd:
    """Takes seconds when the interpreter is finalised."""

    def __del__(self, sleep=time.sleep):  # this module's names may be gone
        sleep(6)


def leave_thread_in_cpp():
    """A thread that waits in C++, and comes back while the interpreter is being finalised."""
    sys.slow_end = SlowEnd()
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=3))
    threading.Thread(target=store.wait, args=(["never"],), daemon=True).start()
    time.sleep(0.5)


class FaultySequences(Sequences):
    fault: Fault

    def __getitems__(self, keys):
        if self.augment and not keys.placeholder:
            self.fault.at("data")
        return super().__getitems__(keys)


class FaultyObjective(WeightedObjective):
    fault: Fault

    def forward(self, batch, phase="train"):
        self.fault.at("forward" if self.training else "evaluation")
        return super().forward(batch, phase)


class Faulty(Weighted):
    def splits(self):
        splits = super().splits()
        for dataset in splits.values():
            if not isinstance(dataset, FaultySequences):
                dataset.__class__ = FaultySequences
                dataset.fault = Fault()
        return splits

    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = FaultyObjective
        objective.fault = Fault()
        objective.fault.calls = -1  # one forward that does not count comes first
        return objective
