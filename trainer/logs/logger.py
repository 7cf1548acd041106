"""Interface of loggers: the console, files, TensorBoard and loggers of the user."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.loading.order import Position
from trainer.task import Picture

DATA_WAIT = "data_wait_seconds"
"""Metric: seconds that rank 0 waited for data. It is not in metrics.jsonl, because it is not reproducible."""


@dataclass(frozen=True)
class LoggedRun:
    """Description of a run for its loggers.

    id: 12 hexadecimal digits, unchanged when the run resumes. directory: `--save-dir`. config: values of all flags in
    JSON types, by name without leading dashes, such as "log-interval". step: optimizer steps completed at the start, 0
    for a new run; a resumed run logs later steps again. last_report: completed steps at the last epoch end or
    evaluation; a resumed run logs later ones again.
    """

    id: str
    directory: Path
    config: Mapping[str, Any]
    step: int
    last_report: int


@dataclass(frozen=True)
class Record:
    """Metrics at one point of a run.

    event: "step", every `--log-interval` steps; "evaluation", within an epoch; "epoch", at an epoch's end; "result",
    the final scores. step: completed optimizer steps. position: None for a result. values: metrics by name, such as
    "train/loss" or "learning_rate"; may be NaN or infinite. text: the metrics as one or more lines.
    """

    event: Literal["step", "evaluation", "epoch", "result"]
    step: int
    position: Position | None
    values: Mapping[str, float]
    text: str


class Logger:
    """Base class of loggers, whose methods do nothing unless overridden.

    Rank 0 creates each logger of `--logger` without arguments, and calls its methods one at a time in a separate
    thread, `start` first and `end` last.
    """

    def start(self, run: LoggedRun) -> None:
        """Called before training."""

    def say(self, line: str) -> None:
        """Logs a line for the user."""

    def metrics(self, record: Record) -> None:
        """Logs metrics; several records may have the same step."""

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Logs an evaluation's images by name, such as "val/confusion_matrix"; each is (height, width, 3) uint8."""

    def end(self, state: str) -> None:
        """Called at the end of a run. state: the state in state.json, such as "finished" or "preempted"."""
