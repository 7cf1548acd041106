"""What the user sees of several runs: a bar over all of them, and a table of their scores."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from trainer.logs.console import of_headline, say, table_line
from trainer.logs.run_log import PLAIN_LINE_INTERVAL_S

SECONDS = "train_seconds"


class Progress:
    """A bar over the epochs of all runs; without a terminal a plain line now and then.

    num_done: epochs done before.
    """

    def __init__(self, num_epochs: int, num_done: int) -> None:
        self._last_line = time.monotonic()
        no_terminal = not sys.stderr.isatty()
        self._bar = tqdm(
            total=num_epochs, initial=num_done, unit=" epochs", leave=False, dynamic_ncols=True, disable=no_terminal
        )

    def show(self, num_done: int, running: Sequence[str]) -> None:
        """running: the names of the runs at work."""
        names = ", ".join(running)
        if self._bar.disable:
            is_due = time.monotonic() - self._last_line >= PLAIN_LINE_INTERVAL_S
            if num_done == self._bar.n or not running or not is_due:
                return
            self._last_line = time.monotonic()
            say(f"{num_done} of {self._bar.total} epochs; running: {names}")
        self._bar.n = num_done
        self._bar.set_postfix_str(names)

    def close(self) -> None:
        self._bar.close()


class Table:
    """Rows of metrics, printed as they come.

    headline: the metrics that it shows, without their split; empty shows all. names: what the runs are called.
    """

    def __init__(self, headline: Sequence[str], names: Sequence[str]) -> None:
        self._headline = headline
        self._name_width = max(map(len, ("deviation", *names)))
        self._columns: list[str] = []

    def run(self, entry: Mapping[str, Any]) -> None:
        """A run, as summary.json has it."""
        self._row(entry["directory"], entry["metrics"], f"{entry[SECONDS]:.1f}")

    def conclusion(self, summary: Mapping[str, Any]) -> None:
        """What summary.json says of all runs together."""
        for name in ("mean", "deviation", "ensemble"):
            if summary[name] is not None:
                self._row(name, summary[name])

    def _row(self, name: str, metrics: Mapping[str, float], seconds: str = "-") -> None:
        if not self._columns:
            self._columns = [*of_headline(metrics, self._headline), SECONDS]
            self._line("run", {column: column for column in self._columns})
        self._line(name, {name: f"{value:.5g}" for name, value in metrics.items()} | {SECONDS: seconds})

    def _line(self, name: str, cells: Mapping[str, str]) -> None:
        say(table_line(f"{name:<{self._name_width}}", self._columns, cells))
