"""A run opened as the command line opens one, for benchmarks that drive its loop."""

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.checkpoint.directory import RunDirectory
from trainer.commands.build import build_run, build_task, open_run, set_up_torch
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.loop.run import Run
from trainer.parallel.base import SingleDevice
from trainer.parallel.devices import keep_freed_memory


def opened_run(folder: Path, argv: Sequence[str], keeps_memory: bool = True) -> Run:
    """On one CPU thread, in the folder. argv: the other flags. keeps_memory: as a run does; see `keep_freed_memory`."""
    argv = ["--save-dir", str(folder), "--device", "cpu", "--num-threads", "1", *argv]
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    parallel = SingleDevice(torch.device("cpu"))
    if keeps_memory:
        keep_freed_memory()
    set_up_torch(flags, parallel)
    task = build_task(flags)
    directory = RunDirectory(folder, flags.checkpoint.retention(task), print)
    directory.acquire()
    run, notes = build_run(flags, task, parallel, directory)
    open_run(run, notes, flags, argv)
    return run
