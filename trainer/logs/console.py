"""Lines, tables and progress bars on the console."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from trainer.common.process import outlived

# tqdm's own lock is one between processes, a semaphore in shared memory that a killed process leaves there. Where
# somebody uses tqdm already, theirs stays.
if not hasattr(tqdm, "_lock"):
    tqdm.set_lock(threading.RLock())

T = TypeVar("T")

PLAIN_LINE_INTERVAL_S = 10.0
NUMBER_WIDTH = len("-1.2345e-05")
SECONDS = "train_seconds"


def say(line: str) -> None:
    """A line on the console, above any bar."""
    with outlived("stdout"):
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows bars though it has no terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def new_bar(*arguments: Any, **options: Any) -> "tqdm[Any]":
    """A bar of tqdm that goes when it is done, where there is something to show it on."""
    kind: Any = tqdm
    is_shown = sys.stderr.isatty()
    if in_notebook():
        from tqdm.auto import tqdm as kind  # it imports much that no command line needs

        is_shown = True
    return kind(*arguments, **options, leave=False, dynamic_ncols=True, disable=not is_shown)


def progress_bar(items: Iterable[T], description: str) -> Iterable[T]:
    """The items, with a bar on a terminal once going through them has taken two seconds."""
    return new_bar(items, description, delay=2)


class ProgressBar:
    """Without a terminal, where a bar would be noise, a plain line now and then.

    num_done: of `total`, done before.
    """

    def __init__(self, total: int, num_done: int, unit: str, description: str = "") -> None:
        self.bar = new_bar(total=total, initial=num_done, desc=description, unit=f" {unit}")
        self._last_line, self._last_time = "", time.monotonic()

    def report(self, state: str, line: str) -> None:
        """state: what the bar ends with from its next update on. line: what stands for the bar where there is none."""
        self.bar.set_postfix_str(state, refresh=False)
        is_due = time.monotonic() - self._last_time >= PLAIN_LINE_INTERVAL_S
        if self.bar.disable and is_due and line != self._last_line:
            self._last_line, self._last_time = line, time.monotonic()
            say(line)

    def close(self) -> None:
        self.bar.close()


class Progress(ProgressBar):
    """A bar over several runs. unit: what their length is counted in."""

    def __init__(self, total: int, num_done: int, unit: str) -> None:
        super().__init__(total, num_done, unit)
        self._unit = unit

    def show(self, num_done: int, running: Sequence[str]) -> None:
        """running: the names of the runs at work."""
        self.bar.n = num_done
        if running:
            names = ", ".join(running)
            self.report(names, f"{num_done} of {self.bar.total} {self._unit}; running: {names}")
        self.bar.refresh()


class Table:
    """Lines of numbers, under a header that comes again when there are new columns.

    heading: of the first column, which has this width. write: prints a line.
    """

    def __init__(self, heading: str, write: Callable[[str], None]) -> None:
        self._heading, self._write = heading, write
        self._columns: list[str] = []

    def row(self, first: str, cells: Mapping[str, str]) -> None:
        """cells: by column; a dash stands where there is none."""
        if not cells.keys() <= set(self._columns):
            self._columns = list(cells)
            self._line(self._heading, {name: name for name in cells})
        self._line(first, cells)

    def _line(self, first: str, cells: Mapping[str, str]) -> None:
        columns = [f"{cells.get(name, '-'):>{max(len(name), NUMBER_WIDTH)}}" for name in self._columns]
        self._write("  ".join([first, *columns]))


class SummaryTable:
    """The scores of several runs, printed as they come.

    headline: the metrics that it shows, without their split; empty shows all. names: what the runs are called.
    """

    def __init__(self, headline: Sequence[str], names: Sequence[str]) -> None:
        self._headline = headline
        self._width = max(map(len, ("deviation", *names)))
        self._table = Table(f"{'run':<{self._width}}", say)

    def run(self, entry: Mapping[str, Any]) -> None:
        """A run, as summary.json has it."""
        self._row(entry["directory"], entry["metrics"], f"{entry[SECONDS]:.1f}")

    def conclusion(self, summary: Mapping[str, Any]) -> None:
        """What summary.json says of all runs together."""
        for name in ("mean", "deviation", "ensemble"):
            if summary[name] is not None:
                self._row(name, summary[name])

    def _row(self, name: str, metrics: Mapping[str, float], seconds: str = "-") -> None:
        cells = {name: f"{value:.5g}" for name, value in of_headline(metrics, self._headline).items()}
        self._table.row(f"{name:<{self._width}}", cells | {SECONDS: seconds})


def of_headline(metrics: Mapping[str, float], headline: Sequence[str]) -> dict[str, float]:
    """The metrics of the headline, which names them without their split; all of them where it names none."""
    return {name: value for name, value in metrics.items() if name.rpartition("/")[2] in headline} or dict(metrics)
