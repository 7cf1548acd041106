"""Lines on the console."""

import os
import sys

from tqdm import tqdm


def say(line: str) -> None:
    """A line on the console, above any bar. Training outlives its console: a closed pipe is no reason to stop."""
    try:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it lasts as long as the process)
