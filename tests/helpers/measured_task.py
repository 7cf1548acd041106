"""Weighted task that regularly records the resources of its process.

LOCKSTEP_MEASURED: folder in which each process appends lines of JSON to its own file.
"""

import json
import os
from pathlib import Path

from tests.helpers.weighted_task import Weighted, WeightedObjective

EVERY = 2000
"""Number of training forwards between two records."""


def what_it_takes():
    process = Path("/proc/self")
    pages = int((process / "statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
    }


class MeasuredObjective(WeightedObjective):
    num_forwards = 0

    def forward(self, batch, phase="train"):
        self.num_forwards += self.training
        if self.training and self.num_forwards % EVERY == 0:
            with open(Path(os.environ["LOCKSTEP_MEASURED"]) / str(os.getpid()), "a") as file:
                file.write(json.dumps({"step": self.num_forwards, **what_it_takes()}) + "\n")
        return super().forward(batch, phase)


class Measured(Weighted):
    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = MeasuredObjective
        return objective
