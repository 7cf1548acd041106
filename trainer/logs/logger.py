"""What a run is logged by: the interface of the console, the files, TensorBoard and loggers of a user's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.loading.order import Position
from trainer.task import Picture

DATA_WAIT = "data_wait_seconds"
"""How long the main process waited for data: no number of the run, so metrics.jsonl does without."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is about to follow.

    id: 12 hexadecimal digits, the same whenever this run goes on. directory: its `--save-dir`. config: every flag by
    its name without dashes, such as "lr", in a form that JSON can hold. step: optimizer steps done, 0 at the start:
    what was logged of later ones comes again. last_report: steps at the last epoch or evaluation.
    """

    id: str
    directory: Path
    config: Mapping[str, Any]
    step: int
    last_report: int


@dataclass(frozen=True)
class Record:
    """Numbers of one moment.

    event: "step", every `--log-interval` steps; "evaluation", within an epoch; "epoch", at the end of one; "result",
    the scores at the end of the run. step: optimizer steps done. position: how far training is; of a result, None.
    values: by name, such as "train/loss" or "learning_rate"; they may be NaN or infinite. text: what people read of
    it, in one line or several.
    """

    event: Literal["step", "evaluation", "epoch", "result"]
    step: int
    position: Position | None
    values: Mapping[str, float]
    text: str


class Logger:
    """Base of everything that logs a run. Each method does nothing unless it is overridden.

    One named by `--logger` is made without arguments, on the main process alone. Its methods are called in a thread of
    its own, one after another, `start` first and `end` last.
    """

    def start(self, run: LoggedRun) -> None:
        """Before training."""

    def say(self, line: str) -> None:
        """A line that the user should read."""

    def metrics(self, record: Record) -> None:
        """Numbers to keep; several records may be of one step."""

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """After an evaluation: arrays by name, such as "val/confusion_matrix", (height, width, 3) uint8."""

    def end(self, state: str) -> None:
        """After training. state: as in state.json, such as "finished" or "preempted"."""
