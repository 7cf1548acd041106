"""What a training process did, noted from inside its model's step, the same way on every side.

A line for each forward in training: the samples, and two weights that change in every step. They name the step: a run
that goes on exactly has the same pair as the unbroken one, and forwards with one pair belong to one step.

The environment variable LOCKSTEP_PEERS asks for it, as JSON: folder, where each process has a file; started, the time
when it was; perhaps die_at, the forward in which the process kills itself, or turns, the settings of a bare loop
that it takes turns with.
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
    """num_uncounted: forwards before the first step that only try the model."""

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
        """Called at the start of every forward in training. weight: of each sample; those without one do not count."""
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
        """In one write, of which a kill leaves all or nothing."""
        os.write(self.file, (json.dumps(line) + "\n").encode())


class Step(NamedTuple):
    """One optimizer step: its name, and the samples that its forwards got, on all processes."""

    weights: tuple[str, ...]
    index: list[int]


def lives(folder: Path) -> list[list[Step]]:
    """The steps that each start of a run began, in order. One that was killed before its first forward has none."""
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
