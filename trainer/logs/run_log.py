"""The run's log, forwarded to all loggers: console, files, TensorBoard and user loggers."""

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
    """The log of ranks other than 0; ignores every call of `RunLog`."""

    data_wait_seconds = 0.0
    state = ""

    def progress(self, items: Iterable[T], description: str) -> Iterable[T]:
        return items

    def _ignore(self, *arguments: object) -> None:
        pass

    say = say_of_ranks = start_segment = advance = step = end_training = report = _ignore
    pictures = result = level = flush = close = _ignore


class RunLog:
    """The log of rank 0.

    headline: metrics shown in tables, without their split; empty shows all. own: user loggers. data_wait_seconds: time
    waited for data since the last report, added to by the loop. state: of state.json, passed to loggers at the end.
    """

    def __init__(self, run: LoggedRun, headline: Sequence[str] = (), own: Sequence[BackgroundLogger] = ()) -> None:
        # slow to import, and needed on rank 0 only
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
        """Logs a line that the user should read."""
        for logger in self._loggers:
            logger.say(printable(text))

    def say_of_ranks(self, step: int, note: str) -> None:
        """Logs how ranks compare after a step."""
        self.say(note)
        self._directory.text("ranks", note, step)

    def level(self, name: str, metric: str, value: float, num_steps: int) -> None:
        """Draws a simple method's score as a line in TensorBoard's plot of the metric. num_steps: of the run."""
        self._directory.level(name, metric, value, num_steps)

    def progress(self, items: Iterable[T], description: str) -> Iterable[T]:
        """Yields the items, with a progress bar on the console if that takes seconds."""
        return progress_bar(items, description)

    def start_segment(self, position: Position, epochs: int | None, num_samples: int, consumed: int) -> None:
        """Opens the epoch's progress bar, also again after a report within the epoch.

        epochs: of the run; None if measured in steps. consumed: samples of the epoch already trained on.
        """
        self._segment_started = time.monotonic()
        self._segment_samples = 0
        self.data_wait_seconds = 0.0
        which = f"epoch {position.epoch + 1}" + (f"/{epochs}" if epochs is not None else "")
        self._console.open_bar(which, num_samples, consumed)

    def advance(self, num_samples: int) -> None:
        """Advances the progress bar by a step."""
        self._segment_samples += num_samples
        assert self._console.bar is not None
        self._console.bar.bar.update(num_samples)

    def step(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """Logs every `--log-interval` steps. metrics: the loss first, then the learning rate."""
        rate = self._segment_samples / max(time.monotonic() - self._segment_started, 1e-9)
        values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        line = f"epoch {position.epoch + 1}  step {step}  {values}  {rate:.0f} samples/s"
        self._log(Record("step", step, position, metrics, line))

    def end_training(self) -> None:
        """Pauses or ends training; an evaluation may follow."""
        self._training_seconds = time.monotonic() - self._segment_started
        self._console.close_bar()

    def report(self, step: int, position: Position, epochs_done: float, metrics: Mapping[str, float]) -> None:
        """Logs a report after an epoch or a validation.

        metrics: since the last report. position: at the end of an epoch, the start of the next. epochs_done: position
        in epochs.
        """
        speed = {
            "samples_per_second": self._segment_samples / max(self._training_seconds, 1e-9),
            "epoch_seconds": time.monotonic() - self._segment_started,
        }
        row = of_headline(metrics, self._headline) | speed
        first = f"{position.epoch:>5}" if position.at_epoch_start else f"{epochs_done:.3f}"[:5]
        self._table.row(first, {name: f"{value:.5g}" for name, value in row.items()})
        text = "\n".join(self._rows)
        self._rows.clear()
        values = {**metrics, **speed, DATA_WAIT: self.data_wait_seconds}
        self._log(Record("epoch" if position.at_epoch_start else "evaluation", step, position, values, text))

    def result(self, step: int, how: str, metrics: Mapping[str, float]) -> None:
        """Logs the final scores. how: such as "with the best weights"."""
        headline = of_headline(metrics, self._headline)
        num_more = len(metrics) - len(headline)
        line = f"Finished, {how}: {scores_text(headline) or 'nothing to score'}"
        line += f", and {num_more} more in results.json" if num_more else ""
        self._log(Record("result", step, None, metrics, line))

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Logs images by name. Raises TypeError for an invalid shape or type."""
        for picture in pictures.values():
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
                raise TypeError(f"a picture must be (height, width, 3) uint8, not {picture.shape} {picture.dtype}")
        for logger in self._loggers if pictures else ():
            logger.pictures(step, pictures)

    def flush(self) -> None:
        """Hands everything to the operating system, so that a kill loses nothing logged before."""
        self._directory.flush()

    def close(self) -> None:
        """Ends all loggers, whatever one of them raises; user loggers get some seconds."""
        with ExitStack() as afterwards:
            for logger in reversed(self._built_in):
                afterwards.callback(logger.end, self.state)
            afterwards.callback(self._tell_notes)
            afterwards.callback(end_all, self._own, self.state, self._say_of_own)
            self.flush()

    def _log(self, record: Record) -> None:
        for logger in self._loggers:
            logger.metrics(record)
        self._tell_notes()

    def _tell_notes(self) -> None:
        """Reports notes about user loggers."""
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
    """Prints lines and a progress bar; `open_bar` and `close_bar` enclose the steps between reports."""

    def __init__(self) -> None:
        self.bar: ProgressBar | None = None

    def open_bar(self, description: str, num_samples: int, consumed: int) -> None:
        """Opens a bar over the epoch's samples. consumed: already trained on."""
        self.bar = ProgressBar(num_samples, consumed, "samples", description)

    def close_bar(self) -> None:
        """Closes the bar."""
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
