"""Opens a run as the command line does, for benchmarks that drive the training loop."""

from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import retention_of
from trainer.commands.build import build_run, build_task, open_run, set_up_torch
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.loop.run import Run
from trainer.parallel.devices import keep_freed_memory, pick_device
from trainer.parallel.strategy import SingleDevice


def opened_run(folder: Path, argv: Sequence[str], device: str = "cpu") -> Run:
    """Opens a run in a folder, on a GPU or on one CPU thread. argv: further flags."""
    threads = ["--num-threads", "1"] if device == "cpu" else []
    argv = ["--save-dir", str(folder), "--device", device, *threads, *argv]
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    strategy = SingleDevice(pick_device(device))
    if device == "cpu":
        keep_freed_memory()
    set_up_torch(flags, strategy.group)
    task = build_task(flags)
    directory = RunDirectory(folder, retention_of(flags.checkpoint, task), print)
    directory.acquire()
    run, notes = build_run(flags, task, strategy, directory)
    open_run(run, notes, flags, argv)
    return run
