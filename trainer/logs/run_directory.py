"""The logs that lie in the run directory, as one logger: train.log, val.log, metrics.jsonl, TensorBoard."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from trainer.common.errors import DiskError
from trainer.common.files import DISK_FULL, FOLDER_GONE, replace_text, without_nan
from trainer.logs.logger import DATA_WAIT, LoggedRun, Logger, Record
from trainer.logs.tensorboard import TensorBoardLogger
from trainer.task import Picture


class RunDirectoryLogger(Logger):
    """Appends to train.log, val.log and metrics.jsonl, and feeds TensorBoard.

    Every method raises DiskError when the disk refuses, and OSError when it is full, which whoever trains tells.
    """

    def __init__(self) -> None:
        self._board = TensorBoardLogger()

    def start(self, run: LoggedRun) -> None:
        self._directory = run.directory
        with self._refusing():
            self._train_log = (run.directory / "train.log").open("a", buffering=1, encoding="utf-8")
            self._val_log = (run.directory / "val.log").open("a", buffering=1, encoding="utf-8")
            self._metrics = _truncated(run.directory / "metrics.jsonl", run.step, run.last_report)
            self._board.start(run)

    def say(self, line: str) -> None:
        with self._refusing():
            self._train_log.write(line + "\n")

    def metrics(self, record: Record) -> None:
        where = {} if record.position is None else {"epoch": record.position.epoch, "samples": record.position.samples}
        numbers = without_nan(record.values)
        numbers.pop(DATA_WAIT, None)
        with self._refusing():
            self._metrics.write(json.dumps({"event": record.event, "step": record.step, **where, **numbers}) + "\n")
            if record.event in ("step", "result"):
                self._train_log.write(record.text + "\n")
            if record.event != "step":
                self._val_log.write(record.text + "\n")
            self._board.metrics(record)

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        with self._refusing():
            self._board.pictures(step, pictures)

    def text(self, name: str, content: str, step: int) -> None:
        """Shows a text in TensorBoard."""
        with self._refusing():
            self._board.text(name, content, step)

    def flush(self) -> None:
        """Hands everything to the operating system, so that a kill loses nothing from before this call."""
        with self._refusing():
            self._board.flush()

    def end(self, state: str) -> None:
        with self._refusing():
            for file in (self._train_log, self._val_log, self._metrics):
                file.close()
            self._board.end(state)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            reason = error.strerror or error if self._directory.is_dir() else FOLDER_GONE
            raise DiskError(
                f"--save-dir {self._directory}: cannot write a log: {reason}; see to the file system and run the same "
                "command again"
            ) from None


def _truncated(path: Path, step: int, last_report: int) -> IO[str]:
    """Opens metrics.jsonl for appending, without later records, records of an end, and any half-written line.

    A report has the step of a checkpoint that was saved before it, at the last step that it tells of.
    """
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # a damaged line is dropped
            record = json.loads(line)
            in_the_past = record["step"] <= (step if record["event"] == "step" else last_report)
            if in_the_past and record["event"] != "result":
                kept.append(line + "\n")
    replace_text(path, "".join(kept))
    return path.open("a", buffering=1, encoding="utf-8")
