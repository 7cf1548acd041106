"""Runs `--predict`: writes a table of a trained model's predictions for new data; needs no training data."""

import csv
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.weights import TrainedRun
from trainer.commands.flags import Flags
from trainer.commands.weights import find_trained, trained_objective
from trainer.common.errors import UserError, printable
from trainer.common.files import refusing_disk_errors, written_as_a_whole
from trainer.common.process import outlived, to_stderr
from trainer.config import flag_name
from trainer.loading.batches import KeyedDataset, of_dtype
from trainer.loading.order import evaluation_keys
from trainer.loading.torch_datasets import require_keyed
from trainer.loading.workers import BatchLoader, Workers
from trainer.logs.console import new_bar, say
from trainer.loop.precision import Precision, choose_precision
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Task

Table = Iterator[Mapping[str, Sequence[Any]]]
"""Iterator over groups of rows of a table. A group maps column names to values, one value per row."""


def label_new_data(flags: Flags, strategy: Strategy) -> None:
    """Runs `--predict`. Without `--output`, standard output contains only the table. Raises UserError."""
    path, output = flags.prediction.predict, flags.prediction.output
    assert path is not None
    run, task = find_trained(flags, to_stderr)
    if output is not None:
        _refuse_to_harm(output, run, task)
    dataset = task.new_data(path)
    require_keyed(dataset, f"--predict {path}")
    if len(dataset) == 0:
        raise UserError(f"--predict {path}: contains no samples to predict; give another file")
    for remark in [*run.remarks, *flags.from_run.remarks, *task.remarks()]:
        to_stderr(remark)
    precision = choose_precision(flags.precision, strategy.device)
    objective = trained_objective(task, run.state["model"], strategy.device, precision.dtype)
    batch_size = flags.batch.eval_batch_size or flags.batch.batch_size
    table = label_samples(task, objective, dataset, strategy, precision, batch_size)
    text = _as_csv(table, len(dataset))
    if output is None:
        print_output(text)
    else:
        write_output(output, text)
        say(f"Predicted {len(dataset)} samples of {path} with {run.label}; the table is in {output}")


def _refuse_to_harm(output: Path, run: TrainedRun, task: Task) -> None:
    target, given = output.resolve(), f"--output {output}"
    is_in_run = (run.folder / MANIFEST).exists() and run.folder.resolve() in target.parents
    if is_in_run and target.suffix.lower() != ".csv":
        raise UserError(f"{given}: could overwrite a file of the run; use a name that ends in .csv, or another folder")
    for field in fields(task.config):
        path = getattr(task.config, field.name)
        if isinstance(path, Path) and path.resolve() in (target, *target.parents):
            harm = "would overwrite" if path.resolve() == target else "would be inside"
            raise UserError(f"{given}: {harm} the run's {flag_name(field.name)} {path}; name another file")


@torch.no_grad()
def label_samples(
    task: Task, objective: Objective, dataset: KeyedDataset, strategy: Strategy, precision: Precision, batch_size: int
) -> Table:
    """Yields the predictions for a data set batch by batch, in order. objective: must be on the strategy's device."""
    objective.eval()
    strategy.group.activity.enter("the predictions")
    with precision.autocast(strategy.device.type):
        objective.start_evaluation()
    loader = BatchLoader([dataset], task.collate, Workers(for_gpu=strategy.device.type == "cuda"))
    shard = strategy.group.rank, strategy.group.world_size
    for batch in loader(evaluation_keys(len(dataset), shard, batch_size)):
        on_device = of_dtype(strategy.to_device(batch), precision.dtype)
        with precision.autocast(strategy.device.type):
            columns = task.predictions(objective, on_device)
        if any(len(values) != len(batch["index"]) for values in columns.values()):
            raise TypeError(f"{type(task).__name__}.predictions must give one value per sample in every column")
        yield columns


def _as_csv(table: Table, num_rows: int) -> str:
    writer = csv.writer(text := io.StringIO(), lineterminator="\n")
    with new_bar(total=num_rows, unit=" lines") as bar:
        for i, columns in enumerate(table):
            if i == 0:
                writer.writerow(columns)
            rows = list(zip(*columns.values(), strict=True))
            writer.writerows(rows)
            bar.update(len(rows))
    return text.getvalue()


def print_output(text: str) -> None:
    """Writes a file's text to standard output, in UTF-8 or escaped for a terminal. Raises UserError if text is lost."""
    if sys.__stdout__ is None:
        raise UserError("standard output: is closed, so the output would be lost; redirect it to a file")
    rest = text.encode(errors="backslashreplace")
    if sys.stdout.isatty():
        rest = "\n".join(map(printable, text.split("\n"))).encode(sys.stdout.encoding, "backslashreplace")
    refusing = refusing_disk_errors("standard output: cannot be written", "redirect it to another file")
    with refusing, outlived("stdout", BrokenPipeError):  # a reader such as `head` may stop early
        while rest:  # with PYTHONUNBUFFERED, a full disk takes a part without an error
            rest = rest[sys.stdout.buffer.write(rest) :]
        sys.stdout.flush()


def write_sample(task: Task, path: Path) -> None:
    """Runs `--sample`: writes an example for `--predict`. Raises UserError if there is no example or `path` exists."""
    content = task.sample()
    if content is None or path.exists():
        problem = f"the task {type(task).__name__} has no sample" if content is None else "already exists; name another"
        raise UserError(f"--sample {path}: {problem}")
    if not isinstance(content, bytes):
        encoding = getattr(task.config, "encoding", None) or "utf-8"
        content = _as_csv(iter([content]), 0).encode(encoding, "backslashreplace")
    write_output(path, content, "--sample")
    say(f"Wrote {path}.")


def write_output(path: Path, content: str | bytes, flag: str = "--output") -> None:
    """Atomically writes the file that a flag names. Raises UserError on disk errors."""
    path = path.resolve()  # replaces the target of a symbolic link, not the link
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with (
        refusing_disk_errors(f"{flag} {path}: cannot be written", "name another file"),
        written_as_a_whole(path, temporary, binary=True) as file,
    ):
        # file names may contain bytes that are not valid text
        file.write(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))
