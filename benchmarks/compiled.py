"""What torch.compile gives a training step on a CPU, and how long compiling takes.

    python benchmarks/compiled.py

The trainer's own step on the tasks' default models, with the compiled module and without in turns; one thread, medians.
A step is worth compiling if the steps that the compiler takes the time of are won back within a usual run.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # read when torch is imported

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.opened_run import opened_run
from trainer.loop.run import Run
from trainer.loop.train import train_step
from trainer.loop.windows import training_windows

COMMAND_LINES = {
    "har": [],
    "sasrec": ["--task", "seqrec", "--no-time", "--no-mhc"],
    "tisasrec with mhc": ["--task", "seqrec"],
}
NUM_WINDOWS = 8
WARM_UP_ROUNDS = 3


class Steps:
    """Trains on the first few windows of the run, again and again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.windows = cycle(list(islice(training_windows(run), NUM_WINDOWS)))
        self.phase = run.task.phases[0]

    def seconds(self, net: nn.Module) -> float:
        """Of going through all windows once."""
        started = time.perf_counter()
        for window in islice(self.windows, NUM_WINDOWS):
            train_step(
                replace(self.run.learner, nets={self.phase: net}), self.run.parallel, self.phase, window.micro_batches,
                total_weight=window.weight, dropout_key=(0, 0, 0, 0),
            )  # fmt: skip
        return time.perf_counter() - started


def measure(argv: list[str], rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = opened_run(Path(folder), argv)
        steps, compiled = Steps(run), torch.compile(run.learner.net)
        first = steps.seconds(compiled)  # every shape of the windows is compiled
        times = [(steps.seconds(run.learner.net), steps.seconds(compiled)) for _ in range(rounds + WARM_UP_ROUNDS)]
        run.close()
        run.directory.release()
    times = times[WARM_UP_ROUNDS:]
    plain_s, compiled_s = (statistics.median(pair) / NUM_WINDOWS for pair in zip(*times, strict=True))
    return {
        "speedup": round(statistics.median(plain / ours for plain, ours in times), 3),
        "step_ms": round(1e3 * plain_s, 2),
        "compiled_step_ms": round(1e3 * compiled_s, 2),
        "compiling_s": round(first - compiled_s * NUM_WINDOWS, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="times that each kind goes through the windows")
    rounds = parser.parse_args().rounds
    result = {}
    for name, argv in COMMAND_LINES.items():
        torch.compiler.reset()
        result[name] = measure(argv, rounds)
        print(f"{name}: {result[name]['speedup']} times as fast after {result[name]['compiling_s']} s", flush=True)
    print(json.dumps(result | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
