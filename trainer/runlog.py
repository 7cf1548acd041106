"""What the user sees of a run: console, progress bar, TensorBoard, train.log, val.log, metrics.jsonl; or silence."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from trainer.plan import Position

PLAIN_LINE_INTERVAL_S = 10.0


class SilentLog:
    """The log of every process but the main one."""

    def say(self, text: str) -> None:
        """One line that the user should read."""

    def start_epoch(self, position: Position, epochs: int, num_samples: int, consumed: int) -> None:
        """Opens the epoch's progress bar. consumed: samples of this epoch trained on before a resume."""

    def advance(self, num_samples: int) -> None:
        """After every step."""

    def step(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """Every `--log-interval` steps."""

    def epoch(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """After the evaluation of an epoch; `position` is the end of it."""

    def end_training(self) -> None:
        """The epoch's training is over, or broken off; its evaluation may follow."""

    def result(self, step: int, metrics: Mapping[str, float]) -> None:
        """The test scores, once."""

    def flush(self) -> None:
        """Hands everything to the operating system, so that a kill loses nothing from before this call."""

    def close(self) -> None:
        """Ends the log."""


class RunLog(SilentLog):
    """The log of the main process, in the run directory and on the console.

    Records later than `step` belong to a future that a resumed run lives again, and are dropped.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self._train_log = (directory / "train.log").open("a", buffering=1)
        self._val_log = (directory / "val.log").open("a", buffering=1)
        self._metrics = _truncated(directory / "metrics.jsonl", step)
        self._board = SummaryWriter(str(directory / "logs"), purge_step=step + 1 if step else None)
        self._bar: tqdm[Any] | None = None
        self._columns: list[str] = []
        self._epoch_started = self._last_line = time.monotonic()
        self._epoch_samples = 0
        self.training_seconds = 0.0

    def say(self, text: str) -> None:
        _print(text)
        self._train_log.write(text + "\n")

    def start_epoch(self, position: Position, epochs: int, num_samples: int, consumed: int) -> None:
        self._epoch_started = time.monotonic()
        self._epoch_samples = 0
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
                _print(line)
        else:
            self._bar.set_postfix(
                loss=f"{metrics['train/loss']:.4f}", lr=f"{metrics['learning_rate']:.2e}", refresh=False
            )

    def end_training(self) -> None:
        self.training_seconds = time.monotonic() - self._epoch_started
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def epoch(self, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        row = {
            **metrics,
            "samples_per_second": self._epoch_samples / max(self.training_seconds, 1e-9),
            "epoch_seconds": time.monotonic() - self._epoch_started,
        }
        self._record("epoch", step, position, row)
        if not self._columns:
            self._columns = list(row)
            header = "  ".join(["epoch", *(f"{name:>{_width(name)}}" for name in self._columns)])
            _print(header)
            self._val_log.write(header + "\n")
        cells = [f"{position.epoch:>5}", *(f"{row.get(name, math.nan):>{_width(name)}.5g}" for name in self._columns)]
        _print("  ".join(cells))
        self._val_log.write("  ".join(cells) + "\n")
        self._last_line = time.monotonic()

    def result(self, step: int, metrics: Mapping[str, float]) -> None:
        self._draw(metrics, step)
        self._metrics.write(json.dumps({"event": "result", "step": step, **_json_numbers(metrics)}) + "\n")
        self._val_log.write("  ".join(f"{name} {value:.5g}" for name, value in metrics.items()) + "\n")

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
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer = self._board.file_writer
        assert writer is not None  # until close()
        writer.add_summary(Summary(value=values), step)


def _json_numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _print(line: str) -> None:
    """A line on the console, above the bar. Training outlives its console: a closed pipe is no reason to stop."""
    try:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it lasts as long as the process)


def _width(name: str) -> int:
    return max(len(name), 8)


def _truncated(path: Path, step: int) -> IO[str]:
    """Opens metrics.jsonl for appending, without the records later than `step` and any half-written line."""
    kept = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.rename(path)
    return path.open("a", buffering=1)
