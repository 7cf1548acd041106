"""Writes a run's logs and TensorBoard events to the run directory."""

import io
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import IO, Any

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard.summary import hparams, text

from trainer.common.errors import DiskError
from trainer.common.files import DISK_FULL, FOLDER_GONE, reason_of, replace_text, without_nan
from trainer.config import shown
from trainer.logs.logger import DATA_WAIT, LoggedRun, Logger, Record
from trainer.task import Picture

HYPERPARAMETERS_SUFFIX = ".hparams"


class RunDirectoryLogger(Logger):
    """Logger that appends to train.log, val.log and metrics.jsonl, and writes TensorBoard events to the folder `logs`.

    Methods raise OSError for a full disk, and DiskError for other disk errors.
    """

    def start(self, run: LoggedRun) -> None:
        self._directory, self._config = run.directory, run.config
        self._folder = run.directory / "logs"
        with self._refusing():
            self._train_log = (run.directory / "train.log").open("a", buffering=1, encoding="utf-8")
            self._val_log = (run.directory / "val.log").open("a", buffering=1, encoding="utf-8")
            self._metrics = _truncated(run.directory / "metrics.jsonl", run.step, run.last_report)
            self._board = _Events(self._folder)
            if run.step:  # TensorBoard then drops later steps of earlier files
                self._board.write(step=run.step + 1, session_log=SessionLog(status=SessionLog.START))
            for path in self._folder.glob("*" + HYPERPARAMETERS_SUFFIX):
                path.unlink()

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
            if record.event == "result":
                self._final_scores(record)
            else:  # one event for all metrics, which takes only as long as three calls of `add_scalar`
                self._board.write(step=record.step, summary=Summary(value=_scalars(record.values)))

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        with self._refusing():
            images = [_image(name, picture) for name, picture in pictures.items()]
            self._board.write(step=step, summary=Summary(value=images))

    def text(self, name: str, content: str, step: int) -> None:
        with self._refusing():
            self._board.write(step=step, summary=text(name, content))

    def level(self, name: str, metric: str, value: float, num_steps: int) -> None:
        """Adds a TensorBoard run called `name`, which shows a score as a horizontal line in the plot of a metric."""
        with self._refusing():
            folder = self._folder / name
            for path in folder.glob("events.*"):
                path.unlink()
            board = _Events(folder)
            for step in (0, num_steps):
                board.write(step=step, summary=Summary(value=_scalars({metric: value})))
            board.close()

    def end(self, state: str) -> None:
        with self._refusing():
            for file in (self._train_log, self._val_log, self._metrics):
                file.close()
            self._board.close()

    def _final_scores(self, record: Record) -> None:
        """Logs a finished run's scores as text and, with all flags, in TensorBoard's table of hyperparameters.

        If they were logged as scalars, each score would become a plot with a single point.
        """
        rows = [f"| {name} | {value:.5g} |" for name, value in record.values.items()]
        self.text("scores", "\n".join(["| metric | at the end |", "| --- | --- |", *rows]), record.step)
        flags = {name: value for name, value in self._config.items() if value is not None}
        shown_flags = {name: value if type(value) in (int, float) else shown(value) for name, value in flags.items()}
        scores = {f"best/{name}": value for name, value in record.values.items() if isfinite(value)}
        _, start, end = hparams({**scores, **shown_flags}, {})
        # Uses a separate file, to be replaced when a run continues with other flags: TensorBoard keeps the first flags
        # that it reads.
        board = _Events(self._folder, HYPERPARAMETERS_SUFFIX)
        board.write(step=record.step, summary=Summary(value=[*start.value, *end.value]))
        board.close()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            reason = reason_of(error, str(self._directory)) if self._directory.is_dir() else FOLDER_GONE
            raise DiskError(
                f"--save-dir {self._directory}: cannot write a log: {reason}; check the file system and run the same "
                "command again"
            ) from None


class _Events:
    """File of TensorBoard events. Each event reaches the operating system at once; methods raise OSError.

    PyTorch's SummaryWriter writes in a thread, which prints a traceback if the disk is full.
    """

    _numbers = itertools.count()
    """Numbers that distinguish files that a process creates within the same second."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        unique = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._file = (folder / f"events.out.tfevents.{unique}{suffix}").open("xb")
        self.write(file_version="brain.Event:2")

    def write(self, **fields: Any) -> None:
        """Writes an event with the given fields of the protocol buffer `Event`, and the current time."""
        RecordWriter(self._file).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _truncated(path: Path, step: int, last_report: int) -> IO[str]:
    """Opens metrics.jsonl for appending; drops final scores, damaged lines, and records after the resumed checkpoint.

    step: completed steps of the checkpoint. last_report: step of the last epoch or evaluation record to keep.
    """
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # a damaged line
            record = json.loads(line)
            in_the_past = record["step"] <= (step if record["event"] == "step" else last_report)
            if in_the_past and record["event"] != "result":
                kept.append(line + "\n")
    replace_text(path, "".join(kept))
    return path.open("a", buffering=1, encoding="utf-8")


def _scalars(values: Mapping[str, float]) -> list[Any]:
    """Builds TensorBoard scalars; a name without a group such as "val/" gets the group "train/"."""
    tags = {name: name if "/" in name else f"train/{name}" for name in values}
    return [Summary.Value(tag=tags[name], simple_value=value) for name, value in values.items()]


def _image(name: str, picture: Picture) -> Any:
    # training waits, and `add_image`, which converts to float32 and compresses more, takes twice as long
    png = io.BytesIO()
    Image.fromarray(picture).save(png, "PNG", compress_level=1)
    height, width, channels = picture.shape
    content = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png.getvalue())
    return Summary.Value(tag=name, image=content)
