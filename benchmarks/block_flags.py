"""What --grad-checkpointing and --compile cost or give a training step on a CPU, in time and in memory.

    python benchmarks/block_flags.py grad-checkpointing
    python benchmarks/block_flags.py compile

The trainer's own step of each model that comes with it, on one thread: with the flag and without, in turns, on the same
windows. Processor time of a step, and by how much it raises the memory of the process at its peak: medians of those of
the plain step, and of the ratios of neighbours. Compiling: the processor time that it adds up to the first steps, with
nothing kept of an earlier one. One process for each model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

# Read when torch is imported.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.on_gpu.models import MODELS
from benchmarks.opened_run import opened_run
from trainer.loop.run import Run
from trainer.loop.train import train_step
from trainer.loop.windows import Window, training_windows

FLAGS = ("grad-checkpointing", "compile")
WITHOUT_BLOCKS = ("kg-lightgcn", "lightgcn", "bprmf")
"""What is compiled of them is the whole; --grad-checkpointing refuses them."""
SMALLER = {
    "plmu": ["--batch-size", "16"],
    "plmu streaming": ["--batch-size", "16"],
    "lmu": ["--batch-size", "16", "--hidden-size", "128", "--num-heads", "4"],
    "nano": ["--num-tables", "64"],
    "tabicl": ["--num-tables", "64", "--batch-size", "2"],
}
"""What makes a step short enough to repeat it on a CPU."""
NUM_WINDOWS = 2
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Of glibc: a tensor's memory leaves the process when the tensor does, so that its size tells of tensors."""


def memory_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(flag: str, name: str, rounds: int) -> dict[str, float]:
    argv = [*MODELS[name], *SMALLER.get(name, [])]
    with tempfile.TemporaryDirectory() as folder:
        plain, windows, plain_s = started_run(Path(folder) / "plain", argv)
        other, _, other_s = started_run(Path(folder) / "other", [*argv, f"--{flag}"])
        pairs = [(steps(plain, windows), steps(other, windows)) for _ in range(rounds)]
        for run in (plain, other):
            run.close()
            run.directory.release()
    plain_ms, plain_mib = (statistics.median(its[i] for its, _ in pairs) for i in range(2))
    time_ratio, memory_ratio = (statistics.median(own[i] / its[i] for its, own in pairs) for i in range(2))
    result = {
        "step ratio": round(time_ratio, 2),
        "memory ratio": round(memory_ratio, 2),
        "plain step ms": round(plain_ms, 1),
        "plain step MiB": round(plain_mib, 1),
    }
    return result | ({"compiling s": round(other_s - plain_s, 1)} if flag == "compile" else {})


def started_run(folder: Path, argv: Sequence[str]) -> tuple[Run, list[Window], float]:
    """A run after its first steps, its first windows, and the processor seconds that it took so far.

    The first steps make the optimizer's moments, and compile what is still to be.
    """
    before = sum(os.times()[:4])  # with its compiler's
    run = opened_run(folder, argv, keeps_memory=False)
    windows = list(islice(training_windows(run), NUM_WINDOWS))
    for _ in range(2):
        steps(run, windows)
    return run, windows, sum(os.times()[:4]) - before


def steps(run: Run, windows: Sequence[Window]) -> tuple[float, float]:
    """Processor milliseconds of a step, and the MiB that it takes at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, started = memory_mib("VmRSS"), time.process_time()
    for window in windows:
        train_step(
            run.learner, run.parallel, run.task.phases[window.step.phase], window.micro_batches,
            total_weight=window.weight, dropout_key=(0, 0, 0, 0), learning_rate=1e-3,
        )  # fmt: skip
    return 1e3 * (time.process_time() - started) / len(windows), memory_mib("VmHWM") - before


def measured_apart(flag: str, name: str, rounds: int) -> dict[str, float]:
    """In a process of its own."""
    command = [sys.executable, __file__, flag, "--here", "--model", name, "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | RETURNED_AT_ONCE)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flag", choices=FLAGS)
    parser.add_argument("--rounds", type=int, default=7, help="times that both take turns")
    parser.add_argument("--model", choices=MODELS, help="measure this one alone")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.flag, args.model, args.rounds)))
        return
    names = [name for name in MODELS if args.flag == "compile" or name not in WITHOUT_BLOCKS]
    result = {}
    for name in names if args.model is None else [args.model]:
        result[name] = measured_apart(args.flag, name, args.rounds)
        print(name, result[name], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
