"""What --grad-checkpointing costs in time and spares in memory, on a CPU.

    python benchmarks/recomputed.py

The trainer's own step on the tasks' models, on one thread, with blocks computed anew and without: processor time, the
median of steps, and by how much a step raises the memory of the process above what it held before, at its peak.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.opened_run import opened_run
from trainer.loop.blocks import recompute
from trainer.loop.run import Run
from trainer.loop.train import train_step
from trainer.loop.windows import training_windows

SPEECH = ["--task", "speech", "--batch-size", "16"]
COMMAND_LINES = {
    "har": [],
    "tinyhar": ["--model", "tinyhar"],
    "deepconvlstm": ["--model", "deepconvlstm"],
    "sasrec": ["--task", "seqrec", "--no-time", "--no-mhc"],
    "tisasrec": ["--task", "seqrec", "--no-mhc"],
    "tisasrec with mhc": ["--task", "seqrec"],
    "plmu": SPEECH,
    "lmu": [*SPEECH, "--model", "lmu", "--hidden-size", "128", "--num-heads", "4"],
    "nano": ["--task", "tabular", "--num-tables", "64", "--num-val-tables", "4"],
}
NUM_WINDOWS = 2
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Of glibc: a tensor's memory leaves the process when the tensor does, so that its size tells of tensors."""


def memory_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(argv: list[str], rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = opened_run(Path(folder), argv, keeps_memory=False)
        windows = list(islice(training_windows(run), NUM_WINDOWS))
        steps(run, windows)  # the first make the optimizer's moments
        plain_s, plain_mib = medians(run, windows, rounds)
        recompute(run.task.blocks(run.learner.objective.model))
        recomputed_s, recomputed_mib = medians(run, windows, rounds)
        run.close()
        run.directory.release()
    return {
        "step_ratio": round(recomputed_s / plain_s, 3),
        "memory_ratio": round(recomputed_mib / plain_mib, 3),
        "step_mib": round(plain_mib, 1),
        "recomputed_step_mib": round(recomputed_mib, 1),
    }


def medians(run: Run, windows: list, rounds: int) -> tuple[float, float]:
    found = [steps(run, windows) for _ in range(rounds)]
    times, memory = zip(*found, strict=True)
    return statistics.median(times), statistics.median(memory)


def steps(run: Run, windows: list) -> tuple[float, float]:
    """Processor time of a step, and the memory that it takes at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, started = memory_mib("VmRSS"), time.process_time()
    for window in windows:
        train_step(
            run.learner, run.parallel, run.task.phases[0], window.micro_batches,
            total_weight=window.weight, dropout_key=(0, 0, 0, 0),
        )  # fmt: skip
    return (time.process_time() - started) / len(windows), memory_mib("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that each kind goes through its steps")
    parser.add_argument("--model", help="measure this one alone, in this process")
    args = parser.parse_args()
    if args.model is not None:
        print(json.dumps(measure(COMMAND_LINES[args.model], args.rounds)))
        return
    result = {}
    for name in COMMAND_LINES:
        command = [sys.executable, __file__, "--model", name, "--rounds", str(args.rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | RETURNED_AT_ONCE)
        result[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, result[name], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
