"""The run directory's own logs: train.log, val.log and metrics.jsonl."""

import json
from contextlib import suppress
from pathlib import Path
from typing import IO

from trainer.common.files import replace_text
from trainer.common.json_numbers import without_nan
from trainer.logs.logger import LoggedRun, Logger, Record

DATA_WAIT = "data_wait_seconds"
"""How long the main process waited for data: no number of the run, so metrics.jsonl does without."""


class FileLogger(Logger):
    """Appends; raises OSError when the disk refuses."""

    def start(self, run: LoggedRun) -> None:
        self._train_log = (run.directory / "train.log").open("a", buffering=1, encoding="utf-8")
        self._val_log = (run.directory / "val.log").open("a", buffering=1, encoding="utf-8")
        self._metrics = _truncated(run.directory / "metrics.jsonl", run.step, run.last_report)

    def say(self, line: str) -> None:
        self._train_log.write(line + "\n")

    def metrics(self, record: Record) -> None:
        where = {} if record.position is None else {"epoch": record.position.epoch, "samples": record.position.samples}
        numbers = without_nan(record.values)
        numbers.pop(DATA_WAIT, None)
        self._metrics.write(json.dumps({"event": record.event, "step": record.step, **where, **numbers}) + "\n")
        if record.event in ("step", "result"):
            self._train_log.write(record.text + "\n")
        if record.event != "step":
            self._val_log.write(record.text + "\n")

    def end(self, state: str) -> None:
        for file in (self._train_log, self._val_log, self._metrics):
            file.close()


def _truncated(path: Path, step: int, last_report: int) -> IO[str]:
    """Opens metrics.jsonl for appending, without later records, those of an end, and any half-written line.

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
