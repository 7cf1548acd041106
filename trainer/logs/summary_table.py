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
        self._shown = num_done
        self._last_line = time.monotonic()
        self._bar = tqdm(
            total=num_epochs,
            initial=num_done,
            unit=" epochs",
            leave=False,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def show(self, num_done: int, running: Sequence[str]) -> None:
        """running: the names of the runs at work."""
        names = ", ".join(running)
        if not self._bar.disable:
            self._bar.set_postfix_str(names, refresh=False)
            self._bar.n = num_done
            self._bar.refresh()
        elif num_done != self._shown and running and time.monotonic() - self._last_line >= PLAIN_LINE_INTERVAL_S:
            self._last_line = time.monotonic()
            self._shown = num_done
            say(f"{num_done} of {self._bar.total} epochs; running: {names}")

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
        self._row(entry["directory"], entry["metrics"], entry[SECONDS])

    def conclusion(self, summary: Mapping[str, Any]) -> None:
        """What summary.json says of all runs together."""
        self._row("mean", summary["mean"])
        self._row("deviation", summary["deviation"])
        if summary["ensemble"] is not None:
            self._row("ensemble", summary["ensemble"])

    def _row(self, name: str, metrics: Mapping[str, float], seconds: float | None = None) -> None:
        if not self._columns:
            self._columns = [*of_headline(metrics, self._headline), SECONDS]
            self._line("run", {column: column for column in self._columns})
        cells = {column: f"{metrics[column]:.5g}" for column in self._columns if column in metrics}
        self._line(name, cells if seconds is None else cells | {SECONDS: f"{seconds:.1f}"})

    def _line(self, name: str, cells: Mapping[str, str]) -> None:
        say(table_line(f"{name:<{self._name_width}}", self._columns, cells))
