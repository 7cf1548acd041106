"""What the user sees of a run: console, progress bar, TensorBoard, train.log, val.log, metrics.jsonl; or silence."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from trainer.loading.files import replace_text
from trainer.loading.order import Position
from trainer.logs.console import of_headline, say, table_line

PLAIN_LINE_INTERVAL_S = 10.0
HYPERPARAMETERS_SUFFIX = ".hparams"


class SilentLog:
    """The log of every process but the main one.

    data_wait_seconds: how long this process waited for data in the current epoch; the loop adds to it.
    """

    data_wait_seconds = 0.0

    def say(self, text: str) -> None:
        """One line that the user should read."""

    def start_epoch(self, position: Position, epochs: int, num_samples: int, consumed: int) -> None:
        """Opens the epoch's progress bar. consumed: samples of this epoch trained on before a resume."""

    def advance(self, num_samples: int) -> None:
        """After every step."""

    def step(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """Every `--log-interval` steps."""

    def epoch(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """After an epoch and its validation, if it has one; `position` is the end of it."""

    def rewind(self, step: int, position: Position) -> None:
        """Forgets the records of what came after a step: training went back to it."""

    def end_training(self) -> None:
        """The epoch's training is over, or broken off; its evaluation may follow."""

    def result(self, step: int, how: str, metrics: Mapping[str, float]) -> None:
        """The scores at the end, once; results.json holds them already. how: "with the best weights"."""

    def pictures(self, step: int, pictures: Mapping[str, Summary.Image]) -> None:
        """Pictures by name, after an evaluation."""

    def hyperparameters(self, values: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
        """Every flag of a finished run by name, and its test scores."""

    def flush(self) -> None:
        """Hands everything to the operating system, so that a kill loses nothing from before this call."""

    def close(self) -> None:
        """Ends the log."""


class RunLog(SilentLog):
    """The log of the main process, in the run directory and on the console.

    step, position: later records belong to a future that a resumed run lives again, and are dropped.
    headline: the metrics that the console and val.log show, without their split; empty shows all.
    """

    def __init__(self, directory: Path, step: int, position: Position, headline: Sequence[str] = ()) -> None:
        self._headline = headline
        self._train_log = (directory / "train.log").open("a", buffering=1)
        self._val_log = (directory / "val.log").open("a", buffering=1)
        self._metrics = _truncated(directory / "metrics.jsonl", step, position.epoch)
        self._board_directory = directory / "logs"
        self._board = SummaryWriter(str(self._board_directory), purge_step=step + 1 if step else None)
        self._forget_hyperparameters()
        self._bar: tqdm[Any] | None = None
        self._columns: list[str] = []
        self._epoch_started = self._last_line = time.monotonic()
        self._epoch_samples = 0
        self.training_seconds = 0.0

    def say(self, text: str) -> None:
        say(text)
        self._train_log.write(text + "\n")

    def start_epoch(self, position: Position, epochs: int, num_samples: int, consumed: int) -> None:
        self._epoch_started = time.monotonic()
        self._epoch_samples = 0
        self.data_wait_seconds = 0.0
        self._bar = tqdm(
            total=num_samples,
            initial=consumed,
            desc=f"epoch {position.epoch + 1}/{epochs}",
            unit=" samples",
            leave=False,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def advance(self, num_samples: int) -> None:
        self._epoch_samples += num_samples
        if self._bar is not None:
            self._bar.update(num_samples)

    def step(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        self._record("step", step, position, metrics)
        rate = self._epoch_samples / max(time.monotonic() - self._epoch_started, 1e-9)
        values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        line = f"epoch {position.epoch + 1}  step {step}  {values}  {rate:.0f} samples/s"
        self._train_log.write(line + "\n")
        if self._bar is None or self._bar.disable:
            # Without a terminal a bar would be noise, and so would a line every few milliseconds.
            if time.monotonic() - self._last_line >= PLAIN_LINE_INTERVAL_S:
                self._last_line = time.monotonic()
                say(line)
        else:
            self._bar.set_postfix(
                loss=f"{metrics['train/loss']:.4f}", lr=f"{metrics['learning_rate']:.2e}", refresh=False
            )

    def rewind(self, step: int, position: Position) -> None:
        path = Path(self._metrics.name)
        self._metrics.close()
        self._metrics = _truncated(path, step, position.epoch)
        self._board.close()
        self._board = SummaryWriter(str(self._board_directory), purge_step=step + 1)

    def end_training(self) -> None:
        self.training_seconds = time.monotonic() - self._epoch_started
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def epoch(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        speed = {
            "samples_per_second": self._epoch_samples / max(self.training_seconds, 1e-9),
            "epoch_seconds": time.monotonic() - self._epoch_started,
        }
        self._record("epoch", step, position, {**metrics, **speed})
        self._draw({"data_wait_seconds": self.data_wait_seconds}, step)
        self._table_row(position.epoch, {**of_headline(metrics, self._headline), **speed})
        self._last_line = time.monotonic()

    def _table_row(self, epoch: int, row: Mapping[str, float]) -> None:
        """A line of the table, under a new header when there are columns that the last one lacks."""
        if not row.keys() <= set(self._columns):
            self._columns = list(row)
            self._table_line("epoch", {name: name for name in row})
        self._table_line(str(epoch), {name: f"{value:.5g}" for name, value in row.items()})

    def _table_line(self, first: str, cells: Mapping[str, str]) -> None:
        line = table_line(f"{first:>5}", self._columns, cells)
        say(line)
        self._val_log.write(line + "\n")

    def result(self, step: int, how: str, metrics: Mapping[str, float]) -> None:
        self._draw(metrics, step)
        self._metrics.write(json.dumps({"event": "result", "step": step, **_json_numbers(metrics)}) + "\n")
        shown = of_headline(metrics, self._headline)
        num_more = len(metrics) - len(shown)
        line = f"Finished, {how}: {scores_text(shown) or 'nothing was left to score'}"
        line += f", and {num_more} more in results.json" if num_more else ""
        self.say(line)
        self._val_log.write(line + "\n")

    def pictures(self, step: int, pictures: Mapping[str, Summary.Image]) -> None:
        self._add(self._board, [Summary.Value(tag=name, image=image) for name, image in pictures.items()], step)

    def hyperparameters(self, values: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
        """TensorBoard's table of runs works out its columns: first the flags in which runs differ.

        The scores stand here once more under names that come first in the alphabet, since it shows the first few.
        """
        # In a file of its own in the same folder: TensorBoard keeps the first flags that it reads of a run, so a run
        # that is trained on with other flags has to replace them.
        _, start, end = hparams({name.lstrip("-"): _as_hyperparameter(value) for name, value in values.items()}, {})
        scores = [Summary.Value(tag=f"best/{name}", simple_value=value) for name, value in metrics.items()]
        board = SummaryWriter(str(self._board_directory), filename_suffix=HYPERPARAMETERS_SUFFIX)
        self._add(board, [*start.value, *end.value, *scores], step)
        board.close()

    def _forget_hyperparameters(self) -> None:
        for path in self._board_directory.glob("*" + HYPERPARAMETERS_SUFFIX):
            path.unlink()

    def flush(self) -> None:
        self._board.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._board.close()
        for file in (self._train_log, self._val_log, self._metrics):
            file.close()

    def _record(self, event: str, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        where = {"event": event, "step": step, "epoch": position.epoch, "samples": position.samples}
        self._metrics.write(json.dumps({**where, **_json_numbers(metrics)}) + "\n")
        self._draw(metrics, step)

    def _draw(self, metrics: Mapping[str, float], step: int) -> None:
        """All in one event, which costs the training thread a third of an `add_scalar` each."""
        self._add(self._board, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()], step)

    @staticmethod
    def _add(board: SummaryWriter, values: Sequence[Summary.Value], step: int) -> None:
        assert board.file_writer is not None  # until close()
        board.file_writer.add_summary(Summary(value=values), step)


def scores_text(metrics: Mapping[str, float]) -> str:
    """Metrics in a sentence: "test/loss 0.1234, test/accuracy 0.9876"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _json_numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _as_hyperparameter(value: Any) -> float | str | None:
    """None leaves a flag out."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _truncated(path: Path, step: int, num_epochs: int) -> IO[str]:
    """Opens metrics.jsonl for appending, without later records, those of an end, and any half-written line.

    An epoch's record has the step of a checkpoint that was saved at the epoch's last step, before its validation.
    """
    kept = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
                in_the_past = record["step"] <= step and (record["event"] != "epoch" or record["epoch"] <= num_epochs)
                if in_the_past and record["event"] != "result":
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # damaged
    replace_text(path, "".join(kept))
    return path.open("a", buffering=1)
