"""Lines on the console."""

import os
import sys
import threading
from collections.abc import Mapping, Sequence

from tqdm import tqdm

# tqdm's own lock is one between processes, a semaphore in shared memory that a killed process leaves there.
tqdm.set_lock(threading.RLock())

NUMBER_WIDTH = len("-1.2345e-05")


def say(line: str) -> None:
    """A line on the console, above any bar. Training outlives its console: a closed pipe is no reason to stop."""
    try:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it lasts as long as the process)


def table_line(first: str, columns: Sequence[str], cells: Mapping[str, str]) -> str:
    """A line of a table of numbers: `first`, then the cell of each column, a dash where there is none."""
    return "  ".join([first, *(f"{cells.get(name, '-'):>{max(len(name), NUMBER_WIDTH)}}" for name in columns)])


def of_headline(metrics: Mapping[str, float], headline: Sequence[str]) -> dict[str, float]:
    """Of metrics by name, such as "val/loss", those of the headline, which leaves out the split; empty takes all."""
    return {name: value for name, value in metrics.items() if not headline or name.partition("/")[2] in headline}
