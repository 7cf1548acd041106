"""Log of a run, which forwards calls to all loggers."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from trainer.common.errors import printable
from trainer.loading.order import Position
from trainer.logs.background import BackgroundLogger, end_all
from trainer.logs.console import ProgressBar, Table, of_headline, progress_bar, say
from trainer.logs.logger import DATA_WAIT, LoggedRun, Logger, Record
from trainer.task import Picture

T = TypeVar("T")


class SilentLog:
    """Log of ranks other than 0, which ignores all calls."""

    data_wait_seconds = 0.0
    state = ""

    def progress(self, items: Iterable[T], description: str) -> Iterable[T]:
        return items

    def _ignore(self, *arguments: object) -> None:
        pass

    say = say_of_ranks = start_segment = advance = step = end_training = report = _ignore
    pictures = result = level = close = _ignore


class RunLog:
    """Log of rank 0.

    headline: as in `SummaryTable`. own: loggers of the user. data_wait_seconds: seconds that the training loop waited
    for data since the last report. state: the run's state in state.json, passed to `Logger.end`.
    """

    def __init__(self, run: LoggedRun, headline: Sequence[str] = (), own: Sequence[BackgroundLogger] = ()) -> None:
        # slow to import; only rank 0 needs it
        from trainer.logs.run_directory import RunDirectoryLogger

        self._headline = headline
        self._console, self._directory, self._own = ConsoleLogger(), RunDirectoryLogger(), own
        self._built_in: tuple[Logger, ...] = (self._console, self._directory)
        self._loggers = (*self._built_in, *own)
        for logger in self._loggers:
            logger.start(run)
        self._rows: list[str] = []
        self._table = Table("epoch", self._rows.append)
        self._segment_started = time.monotonic()
        self._segment_samples = 0
        self._training_seconds = self.data_wait_seconds = 0.0
        self.state = "failed"

    def say(self, text: str) -> None:
        for logger in self._loggers:
            logger.say(printable(text))

    def say_of_ranks(self, step: int, note: str) -> None:
        """Logs a note that compares the ranks' step times. step: completed optimizer steps."""
        self.say(note)
        self._directory.text("ranks", note, step)

    def level(self, name: str, metric: str, value: float, num_steps: int) -> None:
        self._directory.level(name, metric, value, num_steps)

    def progress(self, items: Iterable[T], description: str) -> Iterable[T]:
        return progress_bar(items, description)

    def start_segment(self, position: Position, epochs: int | None, num_samples: int, consumed: int) -> None:
        """Opens the progress bar of an epoch, at its start and after each report within the epoch.

        epochs: epochs of the run; None if its length is in steps. num_samples: samples of the epoch. consumed: samples
        that this epoch has already trained on.
        """
        self._segment_started = time.monotonic()
        self._segment_samples = 0
        self.data_wait_seconds = 0.0
        which = f"epoch {position.epoch + 1}" + (f"/{epochs}" if epochs is not None else "")
        self._console.open_bar(which, num_samples, consumed)

    def advance(self, num_samples: int) -> None:
        self._segment_samples += num_samples
        assert self._console.bar is not None
        self._console.bar.bar.update(num_samples)

    def step(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step. metrics: the first is the loss, the second the learning rate."""
        rate = self._segment_samples / max(time.monotonic() - self._segment_started, 1e-9)
        values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        line = f"epoch {position.epoch + 1}  step {step}  {values}  {rate:.0f} samples/s"
        self._log(Record("step", step, position, metrics, line))

    def end_training(self) -> None:
        """Closes the progress bar and stops the training timer, before an evaluation or at the end."""
        self._training_seconds = time.monotonic() - self._segment_started
        self._console.close_bar()

    def report(self, step: int, position: Position, epochs_done: float, metrics: Mapping[str, float]) -> None:
        """Logs a report after an epoch or an evaluation.

        metrics: metrics since the last report. position: after an epoch, the start of the next epoch. epochs_done:
        completed epochs, including a fraction of the current epoch.
        """
        speed = {"epoch_seconds": time.monotonic() - self._segment_started}
        if self._segment_samples > 0:  # no samples if the run resumed after the epoch's last step
            speed = {"samples_per_second": self._segment_samples / max(self._training_seconds, 1e-9), **speed}
        row = of_headline(metrics, self._headline) | speed
        first = f"{position.epoch:>5}" if position.at_epoch_start else f"{epochs_done:.3f}"[:5]
        self._table.row(first, {name: f"{value:.5g}" for name, value in row.items()})
        text = "\n".join(self._rows)
        self._rows.clear()
        values = {**metrics, **speed, DATA_WAIT: self.data_wait_seconds}
        self._log(Record("epoch" if position.at_epoch_start else "evaluation", step, position, values, text))

    def result(self, step: int, how: str, metrics: Mapping[str, float]) -> None:
        """Logs the final scores. how: which weights were scored, such as "with the best weights"."""
        headline = of_headline(metrics, self._headline)
        num_more = len(metrics) - len(headline)
        line = f"Finished, {how}: {scores_text(headline) or 'nothing to score'}"
        line += f", and {num_more} more in results.json" if num_more else ""
        self._log(Record("result", step, None, metrics, line))

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Logs images by name. Raises TypeError unless each image is (height, width, 3) uint8."""
        for picture in pictures.values():
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
                raise TypeError(f"a picture must be (height, width, 3) uint8, not {picture.shape} {picture.dtype}")
        for logger in self._loggers if pictures else ():
            logger.pictures(step, pictures)

    def close(self) -> None:
        """Ends all loggers, even if a logger raises; the user's loggers must end within END_WITHIN_S seconds."""
        with ExitStack() as afterwards:
            for logger in reversed(self._built_in):
                afterwards.callback(logger.end, self.state)
            afterwards.callback(self._tell_notes)
            afterwards.callback(end_all, self._own, self.state, self._say_of_own)

    def _log(self, record: Record) -> None:
        for logger in self._loggers:
            logger.metrics(record)
        self._tell_notes()

    def _tell_notes(self) -> None:
        for own in self._own:
            for note in own.take_notes():
                self._say_of_own(note)

    def _say_of_own(self, line: str) -> None:
        for logger in self._built_in:
            logger.say(line)


def scores_text(metrics: Mapping[str, float]) -> str:
    """Formats metrics as "test/loss 0.1234, test/accuracy 0.9876"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


class ConsoleLogger(Logger):
    """Logger that prints lines and, between calls of `open_bar` and `close_bar`, shows a progress bar."""

    def __init__(self) -> None:
        self.bar: ProgressBar | None = None

    def open_bar(self, description: str, num_samples: int, consumed: int) -> None:
        self.bar = ProgressBar(num_samples, consumed, "samples", description)

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def say(self, line: str) -> None:
        say(line)

    def metrics(self, record: Record) -> None:
        if record.event == "step":
            assert self.bar is not None
            loss, learning_rate, *_ = record.values.values()
            self.bar.report(f"loss={loss:.4f}, lr={learning_rate:.2e}", record.text)
        else:
            say(record.text)

    def end(self, state: str) -> None:
        self.close_bar()
