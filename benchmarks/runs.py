"""Starts and resumes the runs of main.py that a benchmark compares, each in a folder of its own."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def folder(save_dir: Path, row: str, seed: int) -> Path:
    return save_dir / row.replace(", ", "-").replace(" ", "-") / str(seed)


def main_py(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "main.py", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def train(own: Path, flags: Sequence[str], seed: int) -> None:
    """Starts or resumes a run on one thread, and prints its command; does nothing if the run is finished."""
    if (own / "results.json").exists():
        return
    command = [*flags, "--seed", str(seed), "--num-threads", "1", "--save-dir", str(own)]
    print(shlex.join(["python", "main.py", *command]), flush=True)
    main_py(*command)
