"""A run opened as the command line opens one, for benchmarks that drive its loop."""

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.build import build_run, build_task, open_run, set_up_torch
from trainer.config import refuse
from trainer.directory import RunDirectory
from trainer.flags import parse
from trainer.parallel import SingleDevice
from trainer.run import Run


def opened_run(folder: Path, argv: Sequence[str]) -> Run:
    """On one CPU thread, in the folder. argv: the other flags."""
    argv = ["--save-dir", str(folder), "--device", "cpu", "--num-threads", "1", *argv]
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    parallel = SingleDevice(torch.device("cpu"))
    set_up_torch(flags, parallel)
    directory = RunDirectory(folder, flags.checkpoint.keep_checkpoints, print)
    directory.acquire()
    run, notes = build_run(flags, build_task(flags), parallel, directory)
    open_run(run, notes, flags, argv, directory)
    return run
