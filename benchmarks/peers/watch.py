"""Records the samples of a training process in each forward pass of the model, in the same way for every trainer.

Each training pass adds a line: the samples, and two weights that change in every step and so identify the step. A run
that resumes exactly has the same pairs of weights as an unbroken run. Passes with the same pair belong to one step.

The environment variable LOCKSTEP_PEERS turns recording on. Its value is a JSON object. Required entries: folder, in
which each process writes a file, and started, the time of the start. Optional entries: die_at, the pass in which the
process kills itself, and turns, the settings of a hand-written loop with which the trainer's steps alternate.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from benchmarks.peers.bare import Turns
from benchmarks.peers.tagging import Settings

VARIABLE = "LOCKSTEP_PEERS"


class Watch:
    """Recorder of training forward passes. num_uncounted: passes before the first step, which only try the model."""

    def __init__(self, num_uncounted: int = 0) -> None:
        asked = json.loads(os.environ.get(VARIABLE, "{}"))
        self.file = None
        self.num_forwards = -num_uncounted
        if not asked:
            return
        self.die_at, self.started = asked.get("die_at"), asked.get("started")
        self.turns = Turns(Settings(**asked["turns"])) if "turns" in asked else None
        path = Path(asked["folder"]) / os.environ.get("RANK", "0")
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def seen(self, index: Tensor, model: nn.Module, weight: Tensor | None = None) -> None:
        """Records a training pass at its start. weight: (B,); samples of weight 0 are not recorded."""
        if self.file is None:
            return
        self.num_forwards += 1
        if self.num_forwards <= 0:
            return
        if self.num_forwards == 2:
            self.note({"start_cpu_s": time.process_time(), "start_s": time.time() - self.started})
        if self.turns:
            if (turn := self.turns.next_step()) is not None:
                self.note(turn)
            return
        index = index if weight is None else index[weight > 0]
        self.note({"weights": [value.hex() for value in model.head.bias[:2].tolist()], "index": index.tolist()})
        if self.num_forwards == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, line: dict) -> None:
        """Writes a line with a single system call, so that a kill leaves a complete line or none."""
        os.write(self.file, (json.dumps(line) + "\n").encode())


class Step(NamedTuple):
    """Optimizer step: two weights that identify it, and the samples of its passes on all processes."""

    weights: tuple[str, ...]
    index: list[int]


def lives(folder: Path) -> list[list[Step]]:
    """Returns the steps that each start of a run began, in order; [] for a start killed before its first pass."""
    return [_steps(sorted(start.iterdir())) for start in sorted(folder.iterdir())]


def _steps(files: list[Path]) -> list[Step]:
    found: dict[tuple[str, ...], Step] = {}
    for file in files:
        for line in notes(file):
            if "weights" in line:
                name = tuple(line["weights"])
                found.setdefault(name, Step(name, [])).index.extend(line["index"])
    return list(found.values())


def notes(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
