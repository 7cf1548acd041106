"""What the user sees of a run: console, progress bar, TensorBoard, train.log, val.log, metrics.jsonl; or silence."""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import FileWriter, SummaryWriter
from torch.utils.tensorboard.summary import hparams, image

from trainer.config import shown
from trainer.loading.files import replace_text
from trainer.loading.order import Position
from trainer.logs.console import ProgressBar, Table, of_headline, progress_bar, say
from trainer.task import Picture

T = TypeVar("T")

HYPERPARAMETERS_SUFFIX = ".hparams"


class SilentLog:
    """The log of every process but the main one: does nothing where a `RunLog` does something."""

    data_wait_seconds = 0.0

    def progress(self, items: Iterable[T], description: str) -> Iterable[T]:
        return items

    def _ignore(self, *arguments: object) -> None:
        pass

    say = start_stretch = advance = step = end_training = report = _ignore
    pictures = result = hyperparameters = flush = close = _ignore


class RunLog:
    """The log of the main process, in the run directory and on the console.

    step, last_report: optimizer steps done, and those at the last report; later records belong to a future that a
    resumed run lives again, and are dropped. headline: the metrics that the console and val.log show, without their
    split; empty shows all. data_wait_seconds: how long this process waited for data since the last report; the loop
    adds to it.
    """

    def __init__(self, directory: Path, step: int, last_report: int, headline: Sequence[str] = ()) -> None:
        self._headline = headline
        self._train_log = (directory / "train.log").open("a", buffering=1)
        self._val_log = (directory / "val.log").open("a", buffering=1)
        self._metrics = _truncated(directory / "metrics.jsonl", step, last_report)
        writer: Any = SummaryWriter(str(directory / "logs"), purge_step=step + 1 if step else None)
        self._board: FileWriter = writer.file_writer
        for path in (directory / "logs").glob("*" + HYPERPARAMETERS_SUFFIX):
            path.unlink()
        self._bar: ProgressBar | None = None
        self._table = Table("epoch", self._table_line)
        self._stretch_started = time.monotonic()
        self._stretch_samples = 0
        self._training_seconds = self.data_wait_seconds = 0.0

    def say(self, text: str) -> None:
        """One line that the user should read."""
        say(text)
        self._train_log.write(text + "\n")

    def progress(self, items: Iterable[T], description: str) -> Iterable[T]:
        """The items, with a bar on the console if going through them takes seconds."""
        return progress_bar(items, description)

    def start_stretch(self, position: Position, epochs: int | None, num_samples: int, consumed: int) -> None:
        """Opens the epoch's progress bar, or opens it again after a report within the epoch.

        epochs: of the run, None if it is counted in steps. consumed: of the epoch's samples, those trained on before.
        """
        self._stretch_started = time.monotonic()
        self._stretch_samples = 0
        self.data_wait_seconds = 0.0
        which = f"epoch {position.epoch + 1}" + (f"/{epochs}" if epochs is not None else "")
        self._bar = ProgressBar(num_samples, consumed, "samples", which)

    def advance(self, num_samples: int) -> None:
        """After every step."""
        assert self._bar is not None
        self._stretch_samples += num_samples
        self._bar.bar.update(num_samples)

    def step(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """Every `--log-interval` steps. metrics: the loss first, then the learning rate."""
        assert self._bar is not None
        self._record("step", metrics, step, epoch=position.epoch, samples=position.samples)
        rate = self._stretch_samples / max(time.monotonic() - self._stretch_started, 1e-9)
        values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        line = f"epoch {position.epoch + 1}  step {step}  {values}  {rate:.0f} samples/s"
        self._train_log.write(line + "\n")
        loss, learning_rate, *_ = metrics.values()
        self._bar.report(f"loss={loss:.4f}, lr={learning_rate:.2e}", line)

    def end_training(self) -> None:
        """Training pauses, or ends; an evaluation may follow."""
        assert self._bar is not None
        self._training_seconds = time.monotonic() - self._stretch_started
        self._bar.close()

    def report(self, step: int, position: Position, epochs_done: float, metrics: Mapping[str, float]) -> None:
        """After an epoch and its validation, if it has one, and after each validation within an epoch.

        metrics: since the last report. position: where the run is then, at an epoch's end the start of the next one.
        """
        speed = {
            "samples_per_second": self._stretch_samples / max(self._training_seconds, 1e-9),
            "epoch_seconds": time.monotonic() - self._stretch_started,
        }
        event = "epoch" if position.at_epoch_start else "evaluation"
        self._record(event, {**metrics, **speed}, step, epoch=position.epoch, samples=position.samples)
        self._draw({"data_wait_seconds": self.data_wait_seconds}, step)
        row = of_headline(metrics, self._headline) | speed
        first = f"{position.epoch:>5}" if position.at_epoch_start else f"{epochs_done:.3f}"[:5]
        self._table.row(first, {name: f"{value:.5g}" for name, value in row.items()})

    def _table_line(self, line: str) -> None:
        say(line)
        self._val_log.write(line + "\n")

    def result(self, step: int, how: str, metrics: Mapping[str, float]) -> None:
        """The scores at the end, once. how: "with the best weights"."""
        self._record("result", metrics, step)
        headline = of_headline(metrics, self._headline)
        num_more = len(metrics) - len(headline)
        line = f"Finished, {how}: {scores_text(headline) or 'nothing was left to score'}"
        line += f", and {num_more} more in results.json" if num_more else ""
        self.say(line)
        self._val_log.write(line + "\n")

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Pictures by name, after an evaluation. Raises TypeError for an array of another shape or type."""
        for name, picture in pictures.items():
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
                raise TypeError(f"a picture must be (height, width, 3) uint8, not {picture.shape} {picture.dtype}")
            self._board.add_summary(image(name, picture, dataformats="HWC"), step)

    def hyperparameters(self, values: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
        """Every flag of a finished run by name, and its test scores.

        TensorBoard's table of runs works out its columns: first the flags in which runs differ. The scores stand here
        once more under names that come first in the alphabet, since it shows the first few.
        """
        flags = {name.lstrip("-"): value for name, value in values.items() if value is not None}
        _, start, end = hparams(
            {name: value if type(value) in (int, float) else shown(value) for name, value in flags.items()}, {}
        )
        scores = [Summary.Value(tag=f"best/{name}", simple_value=value) for name, value in metrics.items()]
        # In a file of its own in the same folder: TensorBoard keeps the first flags that it reads of a run, so a run
        # that is trained on with other flags has to replace them.
        board = FileWriter(self._board.get_logdir(), filename_suffix=HYPERPARAMETERS_SUFFIX)
        board.add_summary(Summary(value=[*start.value, *end.value, *scores]), step)
        board.close()

    def flush(self) -> None:
        """Hands everything to the operating system, so that a kill loses nothing from before this call."""
        self._board.flush()

    def close(self) -> None:
        for part in (self._bar, self._board, self._train_log, self._val_log, self._metrics):
            if part is not None:
                part.close()

    def _record(self, event: str, metrics: Mapping[str, float], step: int, **where: int) -> None:
        # JSON knows no NaN and no infinity.
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._metrics.write(json.dumps({"event": event, "step": step, **where, **numbers}) + "\n")
        self._draw(metrics, step)

    def _draw(self, metrics: Mapping[str, float], step: int) -> None:
        """All in one event, which costs the training thread a third of an `add_scalar` each."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._board.add_summary(Summary(value=values), step)


def scores_text(metrics: Mapping[str, float]) -> str:
    """Metrics in a sentence: "test/loss 0.1234, test/accuracy 0.9876"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _truncated(path: Path, step: int, last_report: int) -> IO[str]:
    """Opens metrics.jsonl for appending, without later records, those of an end, and any half-written line.

    A report has the step of a checkpoint that was saved before it, at the last step that it tells of.
    """
    kept = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # a damaged line is dropped
            record = json.loads(line)
            in_the_past = record["step"] <= (step if record["event"] == "step" else last_report)
            if in_the_past and record["event"] != "result":
                kept.append(line + "\n")
    replace_text(path, "".join(kept))
    return path.open("a", buffering=1)
