"""Prints lines, tables and progress bars on the console."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from trainer.common.process import outlived

# tqdm's default lock is a semaphore in shared memory, which a killed process leaves behind. A lock that other code has
# already set is kept.
if not hasattr(tqdm, "_lock"):
    tqdm.set_lock(threading.RLock())

T = TypeVar("T")

PLAIN_LINE_INTERVAL_S = 10.0
NUMBER_WIDTH = len("-1.2345e-05")
SECONDS = "train_seconds"


def say(line: str) -> None:
    """Prints a line to standard output, above any progress bar."""
    with outlived("stdout"):
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which shows progress bars without a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def new_bar(*arguments: Any, **options: Any) -> "tqdm[Any]":
    """Creates a tqdm bar that disappears at its end; without a terminal or notebook it is disabled."""
    kind: Any = tqdm
    is_shown = sys.stderr.isatty()
    if in_notebook():
        from tqdm.auto import tqdm as kind  # imports packages that command lines do not need

        is_shown = True
    return kind(*arguments, **options, leave=False, dynamic_ncols=True, disable=not is_shown)


def progress_bar(items: Iterable[T], description: str) -> Iterable[T]:
    """Yields the items, and shows a progress bar after two seconds."""
    return new_bar(items, description, delay=2)


class ProgressBar:
    """Progress bar on a terminal; without a terminal, a plain line every PLAIN_LINE_INTERVAL_S seconds."""

    def __init__(self, total: int, num_done: int, unit: str, description: str = "") -> None:
        self.bar = new_bar(total=total, initial=num_done, desc=description, unit=f" {unit}")
        self._last_line, self._last_time = "", time.monotonic()

    def report(self, state: str, line: str) -> None:
        """Updates the progress. state: the bar's suffix, shown at its next update. line: printed if there is no bar."""
        self.bar.set_postfix_str(state, refresh=False)
        is_due = time.monotonic() - self._last_time >= PLAIN_LINE_INTERVAL_S
        if self.bar.disable and is_due and line != self._last_line:
            self._last_line, self._last_time = line, time.monotonic()
            say(line)

    def close(self) -> None:
        self.bar.close()


class Progress(ProgressBar):
    """Progress bar over several runs. unit: "steps", "epochs" or "runs"."""

    def __init__(self, total: int, num_done: int, unit: str) -> None:
        super().__init__(total, num_done, unit)
        self._unit = unit

    def show(self, num_done: int, running: Sequence[str]) -> None:
        """Shows progress. num_done: units done in all runs. running: names of runs."""
        self.bar.n = num_done
        if running:
            names = ", ".join(running)
            self.report(names, f"{num_done} of {self.bar.total} {self._unit}; running: {names}")
        self.bar.refresh()


class Table:
    """Table of numbers, printed row by row; the header is printed again before a row with a new column.

    heading: heading of the first column, padded to the column's width.
    """

    def __init__(self, heading: str, write: Callable[[str], None]) -> None:
        self._heading, self._write = heading, write
        self._columns: list[str] = []

    def row(self, first: str, cells: Mapping[str, str]) -> None:
        """Prints a row. first: cell of the first column. cells: other cells by column; missing cells become a dash."""
        if not cells.keys() <= set(self._columns):
            self._columns = list(cells)
            self._line(self._heading, {name: name for name in cells})
        self._line(first, cells)

    def _line(self, first: str, cells: Mapping[str, str]) -> None:
        columns = [f"{cells.get(name, '-'):>{max(len(name), NUMBER_WIDTH)}}" for name in self._columns]
        self._write("  ".join([first, *columns]))


class SummaryTable:
    """Table of the scores of several runs, printed row by row as the runs finish.

    headline: names, without the split, of the metrics to show; if empty, all are shown.
    """

    def __init__(self, headline: Sequence[str], names: Sequence[str]) -> None:
        self._headline = headline
        self._width = max(map(len, ("deviation", *names)))
        self._table = Table(f"{'run':<{self._width}}", say)

    def run(self, entry: Mapping[str, Any]) -> None:
        self._row(entry["directory"], entry["metrics"], f"{entry[SECONDS]:.1f}")

    def conclusion(self, summary: Mapping[str, Any]) -> None:
        for name in ("mean", "deviation", "ensemble"):
            if summary[name] is not None:
                self._row(name, summary[name])

    def _row(self, name: str, metrics: Mapping[str, float], seconds: str = "-") -> None:
        cells = {name: f"{value:.5g}" for name, value in of_headline(metrics, self._headline).items()}
        self._table.row(f"{name:<{self._width}}", cells | {SECONDS: seconds})


def of_headline(metrics: Mapping[str, float], headline: Sequence[str]) -> dict[str, float]:
    """Returns the metrics whose names, without the split, are in `headline`; all metrics if no name matches."""
    return {name: value for name, value in metrics.items() if name.rpartition("/")[2] in headline} or dict(metrics)
