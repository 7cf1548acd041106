"""`--predict`: a finished run labels new data, as a table. Needs neither the training data nor the run's flags."""

import csv
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from tqdm import tqdm

from trainer.checkpoint.weights import TrainedRun, find_weights, load_weights
from trainer.commands.flags import Flags, PredictFlags, RunFlags
from trainer.config import FlagGroup, flag_values, group_from_values, refuse, shown
from trainer.loading.batches import BatchLoader, KeyedDataset
from trainer.loading.errors import BadInput
from trainer.loading.files import written_as_a_whole
from trainer.loading.order import evaluation_keys
from trainer.loading.torch_datasets import require_keyed
from trainer.loop.precision import Precision, choose_precision, of_dtype
from trainer.parallel.base import Parallel
from trainer.task import Objective, Task
from trainer.tasks import find_task

Table = Iterator[Mapping[str, Sequence[Any]]]
"""A table in pieces, one below the other; each is a mapping from column names to equally many values."""


def label_new_data(flags: Flags, parallel: Parallel) -> None:
    """`--predict`. Standard output belongs to the table. Raises BadInput."""
    given = flags.checkpoint
    trained = find_run(given.save_dir, given.resume_from, say=partial(print, file=sys.stderr))
    task_name = flags.run.task if flags.run.task != RunFlags.task else None
    task = rebuild_task(trained, task_name, flags.task, flags.run.cache_dir.expanduser())
    precision = choose_precision(flags.precision, parallel.device)
    batch_size = flags.batch.eval_batch_size or flags.batch.batch_size
    predict(flags.prediction, trained, task, parallel, precision, batch_size)


def find_run(folder: Path, resume_from: Path | None, say: Callable[[str], None]) -> TrainedRun:
    """The best weights of a run directory, or those of one checkpoint file. Raises BadInput."""
    run = find_weights(folder, {"--resume-from": resume_from}, say)
    if not ("task" in run.state and "config" in run.state):
        reason = "holds weights, but not of which model; give the checkpoint of a run"
        raise BadInput(f"--resume-from {resume_from}: {reason}")
    return run


def rebuild_task(run: TrainedRun, task_name: str | None, task_flags: FlagGroup, cache_dir: Path) -> Task:
    """The task that the run was trained with, from what its checkpoint recorded.

    task_name, task_flags: those of this command line. It need not repeat the run's, but must not contradict them; a
    task of a user's own may have moved to another file. task_name: None where it says nothing.

    Raises BadInput.
    """
    config, recorded = run.state["config"], run.state["task"]
    if task_name is None or _may_have_moved(recorded, task_name):
        recorded = task_name or recorded
        _refuse_changes(_stated_flags(task_flags), config, run.label)
    else:
        _refuse_changes({"--task": task_name}, {"--task": recorded}, run.label)
    try:
        task_type = find_task(recorded)
    except BadInput as error:
        raise BadInput(f"{error}; {run.label} were trained with it: say by --task where it is now") from None
    try:
        return task_type(group_from_values(task_type.Config, config), config["--seed"], cache_dir)
    except ValueError as error:
        raise BadInput(f"{run.label}: {error}") from None


def _may_have_moved(recorded: str, given: str) -> bool:
    """Whether two values of `--task` may mean the same: classes of one name, in whichever file."""
    return recorded.rpartition(":")[1:] == given.rpartition(":")[1:]


def _stated_flags(group: FlagGroup) -> dict[str, Any]:
    """The flags that have another value than their default."""
    defaults = flag_values(type(group)())
    return {name: value for name, value in flag_values(group).items() if value != defaults[name]}


def _refuse_changes(given: Mapping[str, Any], recorded: Mapping[str, Any], label: str) -> None:
    """Raises BadInput for the flags that are given otherwise than recorded."""
    nothing = "no such flag"
    refuse(
        [
            f"{name} {shown(value)}: {label} were trained with {shown(recorded.get(name, nothing))}; leave it out"
            for name, value in given.items()
            if value != recorded.get(name, nothing)
        ]
    )


def predict(
    files: PredictFlags, run: TrainedRun, task: Task, parallel: Parallel, precision: Precision, batch_size: int
) -> None:
    """Labels `files.predict` and writes the table to `files.output`, as a whole or not at all.

    batch_size: samples per forward. Raises BadInput.
    """
    assert files.predict is not None
    with _ends_by_exception():
        dataset = task.new_data(files.predict)
        require_keyed(dataset, f"--predict {files.predict}")
        if len(dataset) == 0:
            raise BadInput(f"--predict {files.predict}: holds nothing to label")
        objective = task.build_objective().to(parallel.device, precision.dtype)
        load_weights(objective.model, run.state, "the checkpoint", "the task's code has changed since")
        table = label_samples(task, objective, dataset, parallel, precision, batch_size)
        # A bar and a table on one terminal would overwrite each other.
        silent = not sys.stderr.isatty() or (files.output is None and sys.stdout.isatty())
        with tqdm(total=len(dataset), unit=" samples", leave=False, dynamic_ncols=True, disable=silent) as bar:
            if files.output is None:
                _print_table(table, bar)
                return
            with output_file(files.output) as file:
                _write_table(table, file, bar)
    print(f"Labelled {len(dataset)} samples of {files.predict} with {run.label}: {files.output}")


@torch.no_grad()
def label_samples(
    task: Task, objective: Objective, dataset: KeyedDataset, parallel: Parallel, precision: Precision, batch_size: int
) -> Table:
    """The task's predictions for a data set, in its order, batch by batch. objective: on the device of parallel."""
    objective.eval()
    loader = BatchLoader(dataset, task.collate, pin_memory=parallel.device.type == "cuda")
    for batch in loader(evaluation_keys(len(dataset), parallel.shard, batch_size)):
        on_device = of_dtype(parallel.to_device(batch), precision.dtype)
        with precision.autocast(parallel.device.type):
            columns = task.predictions(objective, on_device)
        if any(len(values) != len(batch["index"]) for values in columns.values()):
            raise TypeError(f"{type(task).__name__}.predictions must give one value per sample in every column")
        yield columns


# --- writing -----------------------------------------------------------------------------------------------------


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


@contextmanager
def output_file(path: Path) -> Iterator[IO[str]]:
    """The file of `--output`, written as a whole or not at all. Raises BadInput when the file system refuses."""
    path = path.resolve()  # what a link points to is replaced, not the link
    try:
        with written_as_a_whole(path, path.with_name(f"{path.name}.{os.getpid()}.tmp")) as file:
            yield file
    except OSError as error:
        raise BadInput(f"--output {path}: cannot be written: {error.strerror}; name another file") from None


@contextmanager
def _ends_by_exception() -> Iterator[None]:
    """Within it a request to end the process takes the way of an exception, so that files are tidied up."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
