"""Programs that are measured in turns: each in a process of its own, which works only when it is asked to.

A side is an object whose methods are asked for by name. `serve` runs in its process, `SideProcess` in the one that
asks; they speak JSON lines over standard input and output. This file needs the standard library alone, so that a side
may run in another environment than the one that asks.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """Some calls of an action. wall, cpu: seconds per call; result: what the last call returned."""

    wall: float
    cpu: float
    result: Any


def serve(load: Callable[[], object]) -> None:
    """Loads a side and answers requests until its input ends. What it prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with contextlib.redirect_stdout(sys.stderr):
        wall = time.perf_counter()
        side = load()
        _answer(answers, {"wall": time.perf_counter() - wall, "cpu": time.process_time(), "result": None})
        for line in sys.stdin:
            request = json.loads(line)
            if request["action"] == "peak":
                _answer(answers, {"wall": 0.0, "cpu": 0.0, "result": peak_bytes()})
                continue
            action, count = getattr(side, request["action"]), request["count"]
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                result = action(**request["arguments"])
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            _answer(answers, {"wall": wall / count, "cpu": cpu / count, "result": result})


def _answer(answers: Any, values: dict[str, Any]) -> None:
    print(json.dumps(values), file=answers, flush=True)


def peak_bytes() -> int | None:
    """The most memory that this process has held, as the kernel counts it; None where it does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])


class SideProcess:
    """A side in a process of its own, on so many threads. `loading` is the turn in which it loaded."""

    def __init__(self, command: Sequence[str], num_threads: int) -> None:
        settings = {"OMP_NUM_THREADS": str(num_threads), "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | settings
        )
        self.loading = self._read()

    def _read(self) -> Turn:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self.process.args)} ended with status {self.process.wait()}; see above")
        return Turn(**json.loads(line))

    def turn(self, action: str, count: int = 1, **arguments: Any) -> Turn:
        """Calls the action so many times."""
        assert self.process.stdin is not None
        request = {"action": action, "count": count, "arguments": arguments}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def result(self, action: str, **arguments: Any) -> Any:
        return self.turn(action, **arguments).result

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(
    reference: SideProcess, lockstep: SideProcess, action: str, repeats: int, counts: tuple[int, int]
) -> dict[str, Any]:
    """Both sides in turns, after one that is not counted: median seconds, and the median of neighbours' ratios.

    counts: calls in each turn of the reference and of this project.
    """
    sides = list(zip((reference, lockstep), counts, strict=True))
    turns = [[side.turn(action, count) for side, count in sides] for _ in range(repeats + 1)][1:]
    measured: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        times = [[getattr(turn, clock) for turn in pair] for pair in turns]
        suffix = "s" if clock == "wall" else "cpu_s"
        for name, column in zip(("reference", "lockstep"), zip(*times, strict=True), strict=True):
            measured[f"{name}_{suffix}"] = round(statistics.median(column), 5)
        ratios = [slow / fast for slow, fast in times]
        measured["ratio" if clock == "wall" else "cpu_ratio"] = round(statistics.median(ratios), 2)
        if clock == "wall":
            measured["ratios"] = [round(ratio, 2) for ratio in ratios]
    return measured
