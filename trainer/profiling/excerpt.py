"""A few optimizer steps of a real run, opened like any other in a folder that is thrown away."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.checkpoint.directory import RunDirectory
from trainer.commands.build import build_run, build_task, open_run, set_up_torch
from trainer.commands.flags import Flags
from trainer.loading.errors import BadInput
from trainer.loading.order import Position
from trainer.loop.nonfinite import prepare
from trainer.loop.run import Run
from trainer.loop.train import Outcome, train_epoch
from trainer.parallel.base import Parallel
from trainer.task import Task


@contextlib.contextmanager
def opened(
    flags: Flags, argv: Sequence[str], parallel: Parallel, task: Task | None = None, quiet: bool = False
) -> Iterator[Run]:
    """A run at its start, with its log, ready to train. Raises BadInput.

    `--save-dir` is left alone. task: with its data loaded already. quiet: without the lines that a run begins with.
    """
    if task is None:
        set_up_torch(flags, parallel)
        task = parallel.together(lambda: build_task(flags))
    with contextlib.ExitStack() as leaving:
        folder = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-profile-")))
        flags = dataclasses.replace(flags, checkpoint=dataclasses.replace(flags.checkpoint, save_dir=folder))
        directory = RunDirectory(folder, flags.checkpoint.keep_checkpoints, print)
        parallel.on_main(directory.acquire)
        leaving.callback(directory.release)
        if quiet:
            console = leaving.enter_context(open(os.devnull, "w"))
            leaving.enter_context(contextlib.redirect_stdout(console))
        run, notes = build_run(flags, task, parallel, directory)
        leaving.callback(run.close)
        open_run(run, notes, flags, argv, directory)
        prepare(run)
        yield run


def train_steps(run: Run, num_steps: int) -> int:
    """Trains for so many optimizer steps, and returns the samples that all processes trained on together.

    It is the shipped loop, over epochs cut short. Of a task with several phases each has so many steps, so that all of
    them are seen. Raises BadInput if training diverges.
    """
    whole = run.plan
    num_samples = num_done = 0
    try:
        while num_done < num_steps:
            most = (num_steps - num_done) * whole.global_batch_size
            run.plan = dataclasses.replace(whole, phase_sizes=tuple(min(size, most) for size in whole.phase_sizes))
            run.progress.position = Position()
            if train_epoch(run) is not Outcome.DONE:
                raise BadInput("training diverged while it was measured; lower --lr")
            num_samples += run.plan.samples_per_epoch
            num_done += run.plan.steps_per_epoch
    finally:
        run.plan = whole
    return num_samples
