"""From the signal to the exit: how long a request to stop takes.

    python benchmarks/stop.py

A model of 8 million parameters, whose state with two moments is 100 MB, trains through the real command lines with one
and with two processes on the CPU. At a random moment one of them gets SIGTERM, SIGINT or SIGUSR1, in turns. Told apart
are the steps that still begin, the time until everything is saved (when state.json says "preempted"), and the rest of
the life of the process. A step takes the median time between two steps; a save that is waited for is timed beside it.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.autoencoder import Autoencoder, AutoencoderFlags, Reproduction
from benchmarks.opened_run import opened_run
from trainer.config import flag
from trainer.loop.checkpointing import finish_saving, save
from trainer.loop.train import train_epoch
from trainer.parallel.signals import STOP_SIGNALS

BATCH_SIZE = 4
LOG = "LOCKSTEP_STEPS"
"""Environment variable: the folder where each process notes when its steps begin."""


class SlowReproduction(Reproduction):
    def __init__(self, model: nn.Module, pause_s: float) -> None:
        super().__init__(model)
        self.pause_s = pause_s

    def forward(self, batch, phase="train"):
        if self.training and LOG in os.environ:
            with open(Path(os.environ[LOG]) / str(os.getpid()), "a") as log:
                log.write(f"{time.time()}\n")
            time.sleep(self.pause_s)
        return super().forward(batch, phase)


@dataclass
class SlowFlags(AutoencoderFlags):
    """Task: slow steps"""

    pause_s: float = flag(0.3, "seconds that every training forward sleeps", at_least=0)


class Slow(Autoencoder):
    Config = SlowFlags
    width, num_layers = 1024, 8

    def build_objective(self):
        return SlowReproduction(self.build_model(), self.config.pause_s)


ARGV = ["--task", f"{__file__}:Slow", "--epochs", "1", "--batch-size", str(BATCH_SIZE)]


@dataclass
class Stop:
    """One request to stop. Times in seconds, since the request unless they say otherwise."""

    steps_begun: int
    step: float
    saved: float
    exited: float


def measure_stop(world_size: int, number: int, rank: int, draw: random.Random) -> Stop:
    """rank: which process gets the signal, in the order of their process numbers."""
    with tempfile.TemporaryDirectory() as folder:
        base, logs = Path(folder), Path(folder) / "steps"
        logs.mkdir()
        launcher = ["main.py"]
        if world_size > 1:
            launcher = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", str(world_size)]
        command = [sys.executable, *launcher, *ARGV, "--device", "cpu", "--num-threads", "1", "--save-dir"]
        process = subprocess.Popen(
            [*command, str(base / "run")], cwd=ROOT, env=os.environ | {LOG: str(logs)}, stdout=subprocess.DEVNULL
        )
        try:
            while len(files := sorted(logs.iterdir())) < world_size or min(len(times_in(file)) for file in files) < 6:
                if process.poll() is not None:
                    sys.exit("a run ended before it was asked to; its message is above")
                time.sleep(0.05)
            # One forward that does not count comes first.
            step = statistics.median(b - a for a, b in pairwise(times_in(files[0])[1:]))
            time.sleep(draw.uniform(0, step))
            asked = time.time()
            os.kill(int(files[rank].name), number)
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        exited = time.time()
        state = base / "run" / "state.json"
        if json.loads(state.read_text())["state"] != "preempted":
            sys.exit(f"the run was not preempted: {state.read_text()}")
        begun = max(sum(moment > asked for moment in times_in(file)) for file in files)
        return Stop(begun, step, state.stat().st_mtime - asked, exited - asked)


def times_in(file: Path) -> list[float]:
    return [float(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def measure_save(num_saves: int = 5) -> float:
    """Median seconds of a save that is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        run = opened_run(Path(folder), [*ARGV, "--num-train", str(BATCH_SIZE)])
        train_epoch(run)
        times = []
        for _ in range(num_saves):
            started = time.perf_counter()
            save(run)
            finish_saving(run.parallel, run.saver)
            times.append(time.perf_counter() - started)
        run.close()
        run.directory.release()
    return statistics.median(times)


def summary(stops: list[Stop], save_s: float) -> dict:
    in_steps = [(stop.saved - save_s) / stop.step for stop in stops]
    return {
        "max_steps_begun": max(stop.steps_begun for stop in stops),
        "median_steps_to_save": round(statistics.median(in_steps), 2),
        "max_steps_to_save": round(max(in_steps), 2),
        "step_s": round(statistics.median(stop.step for stop in stops), 3),
        "signal_to_saved_s": round(statistics.median(stop.saved for stop in stops), 3),
        "saved_to_exit_s": round(statistics.median(stop.exited - stop.saved for stop in stops), 3),
        "max_saved_to_exit_s": round(max(stop.exited - stop.saved for stop in stops), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=9, help="requests to stop for each number of processes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the requests")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    save_s = measure_save()
    print(f"a save that is waited for: {save_s:.3f} s")
    result: dict = {"save_s": round(save_s, 3), "stops": args.stops, "torch": torch.__version__}
    for world_size in (1, 2):
        stops = []
        for i in range(args.stops):
            number = STOP_SIGNALS[i % len(STOP_SIGNALS)]
            stops.append(measure_stop(world_size, number, i % world_size, draw))
            print(
                f"world {world_size}, {signal.Signals(number).name}: {stops[-1].steps_begun} steps begun, saved after "
                f"{stops[-1].saved:.2f} s, gone after {stops[-1].exited:.2f} s",
                flush=True,
            )
        result[f"world_{world_size}"] = summary(stops, save_s)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
