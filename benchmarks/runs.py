"""Runs of main.py that a benchmark compares: each in a folder of its own, and only read where it is finished."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def folder(save_dir: Path, row: str, seed: int) -> Path:
    """Of a row of a table, with a seed."""
    return save_dir / row.replace(", ", "-").replace(" ", "-") / str(seed)


def main_py(*arguments: str) -> str:
    """Output of a command line of main.py."""
    return subprocess.run(
        [sys.executable, "main.py", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def train(own: Path, flags: Sequence[str], seed: int) -> None:
    """Trains on one thread in a folder, or goes on there, and prints the command; does nothing where that is done."""
    if (own / "results.json").exists():
        return
    command = [*flags, "--seed", str(seed), "--num-threads", "1", "--save-dir", str(own)]
    print(shlex.join(["python", "main.py", *command]), flush=True)
    main_py(*command)
