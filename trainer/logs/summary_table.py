"""What the user sees of several runs: a bar over all of them, and a table of their scores."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.logs.console import ProgressBar, Table, of_headline, say

SECONDS = "train_seconds"


class Progress(ProgressBar):
    """A bar over the epochs of all runs."""

    def __init__(self, num_epochs: int, num_done: int) -> None:
        super().__init__(num_epochs, num_done, "epochs")

    def show(self, num_done: int, running: Sequence[str]) -> None:
        """running: the names of the runs at work."""
        self.bar.n = num_done
        if running:
            names = ", ".join(running)
            self.report(names, f"{num_done} of {self.bar.total} epochs; running: {names}")
        self.bar.refresh()


class SummaryTable:
    """Rows of metrics, printed as they come.

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
