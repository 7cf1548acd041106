"""Lines, tables and progress bars on the console."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from trainer.common.process import outlived

# tqdm's default lock is a semaphore in shared memory, which a killed process leaves behind. An existing lock of other
# users stays.
if not hasattr(tqdm, "_lock"):
    tqdm.set_lock(threading.RLock())

T = TypeVar("T")

PLAIN_LINE_INTERVAL_S = 10.0
NUMBER_WIDTH = len("-1.2345e-05")
SECONDS = "train_seconds"


def say(line: str) -> None:
    """Prints a line above any progress bar."""
    with outlived("stdout"):
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def in_notebook() -> bool:
    """Returns whether this process is a notebook kernel, which shows bars without a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def new_bar(*arguments: Any, **options: Any) -> "tqdm[Any]":
    """Creates a tqdm bar that disappears when done; disabled without a terminal or notebook."""
    kind: Any = tqdm
    is_shown = sys.stderr.isatty()
    if in_notebook():
        from tqdm.auto import tqdm as kind  # imports much that command lines do not need

        is_shown = True
    return kind(*arguments, **options, leave=False, dynamic_ncols=True, disable=not is_shown)


def progress_bar(items: Iterable[T], description: str) -> Iterable[T]:
    """Yields the items, with a progress bar on a terminal after two seconds."""
    return new_bar(items, description, delay=2)


class ProgressBar:
    """A progress bar on a terminal; elsewhere an occasional plain line.

    num_done: of `total`, done before.
    """

    def __init__(self, total: int, num_done: int, unit: str, description: str = "") -> None:
        self.bar = new_bar(total=total, initial=num_done, desc=description, unit=f" {unit}")
        self._last_line, self._last_time = "", time.monotonic()

    def report(self, state: str, line: str) -> None:
        """state: the bar's suffix from its next update on. line: printed where there is no bar."""
        self.bar.set_postfix_str(state, refresh=False)
        is_due = time.monotonic() - self._last_time >= PLAIN_LINE_INTERVAL_S
        if self.bar.disable and is_due and line != self._last_line:
            self._last_line, self._last_time = line, time.monotonic()
            say(line)

    def close(self) -> None:
        self.bar.close()


class Progress(ProgressBar):
    """A progress bar over several runs. unit: of their length."""

    def __init__(self, total: int, num_done: int, unit: str) -> None:
        super().__init__(total, num_done, unit)
        self._unit = unit

    def show(self, num_done: int, running: Sequence[str]) -> None:
        """running: names of the running runs."""
        self.bar.n = num_done
        if running:
            names = ", ".join(running)
            self.report(names, f"{num_done} of {self.bar.total} {self._unit}; running: {names}")
        self.bar.refresh()


class Table:
    """Prints rows of numbers; repeats the header when columns change.

    heading: of the first column, which has this width. write: prints a line.
    """

    def __init__(self, heading: str, write: Callable[[str], None]) -> None:
        self._heading, self._write = heading, write
        self._columns: list[str] = []

    def row(self, first: str, cells: Mapping[str, str]) -> None:
        """cells: by column; missing ones show a dash."""
        if not cells.keys() <= set(self._columns):
            self._columns = list(cells)
            self._line(self._heading, {name: name for name in cells})
        self._line(first, cells)

    def _line(self, first: str, cells: Mapping[str, str]) -> None:
        columns = [f"{cells.get(name, '-'):>{max(len(name), NUMBER_WIDTH)}}" for name in self._columns]
        self._write("  ".join([first, *columns]))


class SummaryTable:
    """A table of the scores of several runs, printed as they finish.

    headline: metrics to show, without their split; empty shows all. names: of the runs.
    """

    def __init__(self, headline: Sequence[str], names: Sequence[str]) -> None:
        self._headline = headline
        self._width = max(map(len, ("deviation", *names)))
        self._table = Table(f"{'run':<{self._width}}", say)

    def run(self, entry: Mapping[str, Any]) -> None:
        """Prints a run's entry of summary.json."""
        self._row(entry["directory"], entry["metrics"], f"{entry[SECONDS]:.1f}")

    def conclusion(self, summary: Mapping[str, Any]) -> None:
        """Prints summary.json's results over all runs."""
        for name in ("mean", "deviation", "ensemble"):
            if summary[name] is not None:
                self._row(name, summary[name])

    def _row(self, name: str, metrics: Mapping[str, float], seconds: str = "-") -> None:
        cells = {name: f"{value:.5g}" for name, value in of_headline(metrics, self._headline).items()}
        self._table.row(f"{name:<{self._width}}", cells | {SECONDS: seconds})


def of_headline(metrics: Mapping[str, float], headline: Sequence[str]) -> dict[str, float]:
    """Selects the headline metrics, named without their split; all if none match."""
    return {name: value for name, value in metrics.items() if name.rpartition("/")[2] in headline} or dict(metrics)
