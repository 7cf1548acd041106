"""`--predict`: a finished run labels new data, as a table. Needs neither the training data nor the run's flags."""

import csv
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm

from trainer.checkpoint.weights import TrainedRun
from trainer.commands.flags import Flags, RunFlags
from trainer.commands.trained import find_run, recorded_class, recorded_task, trained_objective
from trainer.config import flag_name, flag_values, refuse, shown
from trainer.loading.batches import BatchLoader, KeyedDataset, Workers
from trainer.loading.errors import BadInput
from trainer.loading.files import refusing_disk_errors, written_as_a_whole
from trainer.loading.order import evaluation_keys
from trainer.loading.torch_datasets import require_keyed
from trainer.loop.precision import Precision, choose_precision, of_dtype
from trainer.parallel.base import Parallel
from trainer.task import Objective, Task
from trainer.tasks import is_same_task

Table = Iterator[Mapping[str, Sequence[Any]]]
"""A table in pieces, one below the other; each is a mapping from column names to equally many values."""


def label_new_data(flags: Flags, parallel: Parallel) -> None:
    """`--predict`. Without `--output` standard output belongs to the table. Raises BadInput."""
    path, output, given = flags.prediction.predict, flags.prediction.output, flags.checkpoint
    assert path is not None
    run = find_run(flags, {"--resume-from": given.resume_from}, _shipped(flags), partial(print, file=sys.stderr))
    task = rebuild_task(run, flags)
    dataset = task.new_data(path)
    require_keyed(dataset, f"--predict {path}")
    if len(dataset) == 0:
        raise BadInput(f"--predict {path}: holds nothing to label")
    for remark in task.remarks():
        print(remark, file=sys.stderr)
    precision = choose_precision(flags.precision, parallel.device)
    hint = "the task's code has changed since, or the data that it reads"
    weights = run.state["model"]
    objective = trained_objective(task, weights, parallel.device, precision.dtype, "the checkpoint", hint)
    batch_size = flags.batch.eval_batch_size or flags.batch.batch_size
    table = label_samples(task, objective, dataset, parallel, precision, batch_size)
    # A bar and a table on one terminal would overwrite each other.
    silent = not sys.stderr.isatty() or (output is None and sys.stdout.isatty())
    with tqdm(total=len(dataset), unit=" lines", leave=False, dynamic_ncols=True, disable=silent) as bar:
        if output is None:
            _print_table(table, bar)
            return
        text = io.StringIO()
        _write_table(table, text, bar)
    write_output(output, text.getvalue())
    print(f"Labelled {path} with {run.label}: {len(dataset)} lines in {output}")


def _shipped(flags: Flags) -> Path | None:
    assert flags.task_type is not None
    return flags.task_type(flags.task, flags.run.seed, flags.run.cache_dir.expanduser()).shipped_weights()


def rebuild_task(run: TrainedRun, flags: Flags) -> Task:
    """The task that the run was trained with, from what its checkpoint recorded.

    The command line need not repeat the flags of the run, but must not contradict them, except for those that the task
    takes anew (`Task.predict_flags`); the file of a task of a user's own may have moved. Raises BadInput.
    """
    if not ("task" in run.state and "config" in run.state):
        reason = "holds weights, but not of which model; give the checkpoint of a run"
        raise BadInput(f"--resume-from {flags.checkpoint.resume_from}: {reason}")
    name, config = run.state["task"], run.state["config"]
    stated = {flag: value for flag, value in flag_values(flags.task).items() if flag in flags.given}
    task_type = None
    if flags.run.task != RunFlags.task:
        if is_same_task(flags.run.task, name):
            task_type = flags.task_type
        else:
            stated = {"--task": flags.run.task}
    task_type = task_type or recorded_class(run, name, "say by --task where it is now")
    anew = {flag: stated.pop(flag) for flag in map(flag_name, task_type.predict_flags) if flag in stated}
    nothing = "no such flag"
    refuse(
        [
            f"{flag} {shown(value)}: {run.label} were trained with {shown(config.get(flag, nothing))}; leave it out"
            for flag, value in stated.items()
            if value != config.get(flag, nothing)
        ]
    )
    return recorded_task(run, task_type, flags.run.cache_dir, anew)


@torch.no_grad()
def label_samples(
    task: Task, objective: Objective, dataset: KeyedDataset, parallel: Parallel, precision: Precision, batch_size: int
) -> Table:
    """The task's predictions for a data set, in its order, batch by batch. objective: on the device of parallel."""
    objective.eval()
    with precision.autocast(parallel.device.type):
        objective.start_evaluation()
    loader = BatchLoader(dataset, task.collate, Workers(pin_memory=parallel.device.type == "cuda"))
    for batch in loader(evaluation_keys(len(dataset), parallel.shard, batch_size)):
        on_device = of_dtype(parallel.to_device(batch), precision.dtype)
        with precision.autocast(parallel.device.type):
            columns = task.predictions(objective, on_device)
        if any(len(values) != len(batch["index"]) for values in columns.values()):
            raise TypeError(f"{type(task).__name__}.predictions must give one value per sample in every column")
        yield columns


def _write_table(table: Table, file: IO[str], bar: "tqdm[Any]") -> None:
    writer = csv.writer(file, lineterminator="\n")
    for i, columns in enumerate(table):
        if i == 0:
            writer.writerow(columns)
        rows = list(zip(*columns.values(), strict=True))
        writer.writerows(rows)
        bar.update(len(rows))


def _print_table(table: Table, bar: "tqdm[Any]") -> None:
    try:
        _write_table(table, sys.stdout, bar)
        sys.stdout.flush()
    except BrokenPipeError:
        # A reader such as `head` has seen enough; python's own flush at exit must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_output(path: Path, text: str) -> None:
    """Writes the file of `--output`, as a whole or not at all. Raises BadInput when the file system refuses."""
    path = path.resolve()  # what a link points to is replaced, not the link
    with (
        refusing_disk_errors(f"--output {path}: cannot be written", "name another file"),
        written_as_a_whole(path, path.with_name(f"{path.name}.{os.getpid()}.tmp")) as file,
    ):
        file.write(text)
