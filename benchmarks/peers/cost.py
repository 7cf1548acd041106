"""Measures the time of a step and of a start of Lockstep, Lightning and Accelerate, relative to a hand-written loop.

    pip install -r requirements.txt -r benchmarks/peers/requirements.txt
    python benchmarks/peers/cost.py

Step: the trainer runs an epoch of 400 steps with its usual logs, but without a progress bar, whose cost depends on time
rather than steps. Trainer and hand-written loop alternate in one process, in blocks of 20 steps. The result is the
median ratio of neighbouring blocks, for CPU time and for wall-clock time. Start: the result is the time from the start
of the program to the start of its second step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.peers.sides import ROOT, SIDES, command, watched
from benchmarks.peers.tagging import Settings
from benchmarks.peers.watch import notes

SETTINGS = Settings(
    num_train=6400, epochs=1, micro_batch=16, width=64, save_every=0,
    optimizer="adamw", lr=1e-3, max_grad_norm=1.0, dtype="float32",
)  # fmt: skip


def measure(side: str) -> dict[str, float]:
    """Returns the seconds that a run takes to start, and the median time ratios of its blocks of steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = subprocess.run(
            command(side, SETTINGS, folder / "run"),
            cwd=ROOT,
            env=os.environ | watched(folder, turns=asdict(SETTINGS)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
        start, *turns = notes(folder / "0")
    return start | {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each trainer; the trainers take turns")
    return parser


def main() -> None:
    args = parser().parse_args()
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in args.sides}
    for _ in range(args.rounds):
        for side in args.sides:
            runs[side].append(measure(side))
            print(json.dumps({"side": side, **runs[side][-1]}), flush=True)
    for side, of_side in runs.items():
        medians = {name: round(statistics.median(run[name] for run in of_side), 3) for name in of_side[0]}
        print(json.dumps({"side": side, "rounds": args.rounds, **medians, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
