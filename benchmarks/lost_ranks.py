"""What the death of a rank costs: steps that are computed twice, and seconds until the first new one is done.

    python benchmarks/lost_ranks.py

A small model trains on three processes of one machine, which the trainer starts by itself. Whenever they have trained
for a while, one of them is struck at a random moment: killed (SIGKILL), stopped (SIGSTOP, missed after a
`--dist-timeout-s` of 10), or an exception is raised in it. After the first two the trainer starts all again by itself;
after an exception the same command is given again. Nothing is saved in between but at the end of an epoch of 100 steps.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.autoencoder import Autoencoder, Reproduction

WORLD_SIZE, BATCH_SIZE, STEPS_PER_EPOCH = 3, 4, 100
DIST_TIMEOUT_S = 10
LOG = "LOCKSTEP_STEPS"
"""Environment variable: the folder where each process notes when its steps begin."""
HOWS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "raised": signal.SIGUSR2}
PATIENCE_S = 180


def fall(number, frame):
    raise ValueError("the sky fell")


class NotedReproduction(Reproduction):
    def forward(self, batch, phase="train"):
        if self.training and LOG in os.environ:
            with open(Path(os.environ[LOG]) / str(os.getpid()), "a") as log:
                log.write(f"{time.time()}\n")
            time.sleep(0.01)
        return super().forward(batch, phase)


class Noted(Autoencoder):
    width, num_layers = 64, 2

    def build_objective(self):
        signal.signal(HOWS["raised"], fall)
        return NotedReproduction(self.build_model())


@dataclass
class Death:
    """twice: optimizer steps that some rank had begun, and that were computed again. seconds: from the death on."""

    how: str
    twice: int
    seconds: float


class Group:
    """One run, started again by its own launcher, or by this if that ends."""

    def __init__(self, folder: Path) -> None:
        self._logs, self._output = folder / "steps", folder / "output"
        self._logs.mkdir()
        launcher = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", str(WORLD_SIZE), "--device", "cpu"]
        settings = {
            "--task": f"{__file__}:Noted", "--epochs": 10**6, "--batch-size": BATCH_SIZE, "--num-threads": 1,
            "--num-train": STEPS_PER_EPOCH * BATCH_SIZE * WORLD_SIZE, "--dist-timeout-s": DIST_TIMEOUT_S,
            "--save-dir": folder / "run",
        }  # fmt: skip
        self._command = [sys.executable, *launcher, *(str(part) for pair in settings.items() for part in pair)]
        self._seen: set[Path] = set()
        self._launch()

    def _launch(self) -> None:
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=os.environ | {LOG: str(self._logs)}, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def await_steps(self, num_steps: int) -> list[Path]:
        """Waits until every rank of the latest start has begun so many; returns their files. Starts it if it ended."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            files = [path for path in self._logs.iterdir() if path not in self._seen]
            # A forward that does not count comes first.
            if len(files) == WORLD_SIZE and all(len(times_in(file)) > num_steps + 1 for file in files):
                return files
            if self._process.poll() is not None:
                self._seen |= {path for path in files if not is_alive(int(path.name))}
                self._launch()
            if time.monotonic() > deadline:
                sys.exit(f"the run does not go on:\n{self._output.read_text()[-3000:]}")
            time.sleep(0.01)

    def strike(self, how: str, files: list[Path], draw: random.Random) -> Death:
        first = self._resumed_at()
        moment = time.time()
        os.kill(int(draw.choice(files).name), HOWS[how])
        while any(is_alive(int(file.name)) for file in files):
            time.sleep(0.01)
        begun = first + max(len(times_in(file)) - 1 for file in files)
        self._seen |= set(files)
        again = self.await_steps(1)
        # The second begins when the first is done.
        return Death(how, begun - self._resumed_at(), max(times_in(file)[2] for file in again) - moment)

    def _resumed_at(self) -> int:
        """The optimizer step after which the latest start goes on."""
        starts = self._output.read_text().split("Devices: ")
        found = re.search(r"Resuming after optimizer step (\d+)", starts[-1])
        return int(found[1]) if found else 0

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def times_in(file: Path) -> list[float]:
    return [float(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def summary(deaths: list[Death]) -> dict:
    seconds = [death.seconds for death in deaths]
    return {
        "deaths": len(deaths),
        "steps_twice": {n: sum(death.twice == n for death in deaths) for n in sorted({d.twice for d in deaths})},
        "median_s": round(statistics.median(seconds), 1),
        "max_s": round(max(seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=150, help="by turns of the three kinds")
    parser.add_argument("--seed", type=int, default=0, help="of their moments, and of the ranks")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    deaths: list[Death] = []
    with tempfile.TemporaryDirectory() as folder:
        group = Group(Path(folder))
        try:
            for number in range(args.deaths):
                files = group.await_steps(draw.randint(2, 60))
                time.sleep(draw.uniform(0, 0.05))
                deaths.append(group.strike([*HOWS][number % len(HOWS)], files, draw))
                print(deaths[-1], flush=True)
        finally:
            group.end()
    result: dict = {how: summary([death for death in deaths if death.how == how]) for how in HOWS}
    print(json.dumps(result | {"all": summary(deaths), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
