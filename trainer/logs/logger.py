"""The logger interface, implemented by the console, files, TensorBoard and user loggers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.loading.order import Position
from trainer.task import Picture

DATA_WAIT = "data_wait_seconds"
"""Time that rank 0 waited for data; not reproducible, so not in metrics.jsonl."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger follows.

    id: 12 hexadecimal digits, kept when the run resumes. directory: its `--save-dir`. config: every flag by name
    without dashes, such as "lr", JSON-compatible. step: optimizer steps done, 0 at the start; records of later steps
    will be logged again. last_report: steps at the last epoch or evaluation.
    """

    id: str
    directory: Path
    config: Mapping[str, Any]
    step: int
    last_report: int


@dataclass(frozen=True)
class Record:
    """Metrics at one moment.

    event: "step", every `--log-interval` steps; "evaluation", within an epoch; "epoch", at its end; "result", the final
    scores. step: optimizer steps done. position: of training; None for a result. values: by name, such as "train/loss"
    or "learning_rate"; may be NaN or infinite. text: readable form, of one line or several.
    """

    event: Literal["step", "evaluation", "epoch", "result"]
    step: int
    position: Position | None
    values: Mapping[str, float]
    text: str


class Logger:
    """Base class of loggers. Methods do nothing unless overridden.

    A `--logger` class is created without arguments, on rank 0 only. Its methods run in a thread of their own, one after
    another, `start` first and `end` last.
    """

    def start(self, run: LoggedRun) -> None:
        """Runs before training."""

    def say(self, line: str) -> None:
        """Logs a line that the user should read."""

    def metrics(self, record: Record) -> None:
        """Logs metrics; several records may share a step."""

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Logs images after an evaluation, by names such as "val/confusion_matrix", (height, width, 3) uint8."""

    def end(self, state: str) -> None:
        """Runs after training. state: as in state.json, such as "finished" or "preempted"."""
