"""Kills a run four times, resumes it on another number of processes each time, and compares it with an unbroken run.

    pip install matplotlib
    python benchmarks/killed.py --output docs/killed.svg

The script draws the losses of both runs, which train on the CPU with `--parts 4` and any further flags that you give.
The exit status is 1 if any bit of model, optimizer state, test scores or metrics differs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.equal_bits import learnt

FLAGS = ("--parts", "4", "--global-batch-size", "64", "--log-interval", "5", "--save-every-steps", "20")
STARTS = ((4, 60), (2, 140), (1, 230), (4, 330), (2, None))
"""Number of processes of each start, and the optimizer step at which the start is killed, if any."""


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(record["step"], record["train/loss"]) for record in records if record["event"] == "step"]


def train(folder: Path, num_processes: int, kill_at: int | None, argv: list[str]) -> list[tuple[int, float]]:
    """Starts or resumes training, kills it at step kill_at, if given, and returns the losses that this start logged."""
    before = dict(losses(folder))
    program = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", str(num_processes)]
    command = [sys.executable, *program, "--device", "cpu", *FLAGS, *argv, "--save-dir", str(folder)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    while run.poll() is None:
        time.sleep(0.02)
        if kill_at is not None and max(dict(losses(folder)), default=0) >= kill_at:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    if kill_at is None and run.returncode:
        sys.exit(f"the run on {num_processes} processes ended with status {run.returncode}")
    return [(step, loss) for step, loss in losses(folder) if step not in before]


def draw(unbroken: list[tuple[int, float]], starts: list[list[tuple[int, float]]], output: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.plot(*zip(*unbroken, strict=True), color="0.8", linewidth=6, label="never stopped, 1 process")
    colors = {4: "C0", 2: "C1", 1: "C2"}
    for (num_processes, kill_at), points in zip(STARTS, starts, strict=True):
        words = f"killed and resumed, {num_processes} process{'es' * (num_processes > 1)}"
        known = axes.get_legend_handles_labels()[1]
        axes.plot(*zip(*points, strict=True), color=colors[num_processes], label=None if words in known else words)
        if kill_at is not None:
            axes.plot(*points[-1], "x", color="black", markersize=9, markeredgewidth=2)
    axes.set(xlabel="optimizer step", ylabel="training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    plt.rcParams["svg.hashsalt"] = output.name  # so that equal losses give equal files
    figure.savefig(output, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="image file to write, .svg or .png")
    args, argv = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        unbroken, killed = Path(name) / "unbroken", Path(name) / "killed"
        curve = train(unbroken, 1, None, argv)
        starts = [train(killed, num_processes, kill_at, argv) for num_processes, kill_at in STARTS]
        digests = learnt(unbroken), learnt(killed)
    for what in digests[0]:
        print(f"{what:14} {digests[0][what][:16]} unbroken, {digests[1][what][:16]} killed")
    draw(curve, starts, args.output)
    sys.exit(digests[0] != digests[1])


if __name__ == "__main__":
    main()
