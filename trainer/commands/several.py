"""`--seeds` and `--folds`: trains several runs, and reports on them together.

Each is an ordinary run in a folder of its own, so that it goes on where it was, and can be repeated by hand.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.directory import RunDirectory
from trainer.commands.build import build_task, set_up_torch
from trainer.commands.ensemble import ensemble_metrics
from trainer.commands.flags import Flags
from trainer.commands.processes import Child, run_children
from trainer.commands.variant_folder import VariantFolder
from trainer.commands.variants import variants
from trainer.loading.errors import BadInput
from trainer.logs.console import say
from trainer.logs.summary_table import Progress, Table
from trainer.parallel.base import SingleDevice
from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags, num_cores, pick_device
from trainer.parallel.signals import StopRequest
from trainer.task import Task

SUMMARY = "summary.json"

RunAlone = Callable[[Sequence[str]], int]
"""Runs one command line and returns its exit status; picklable."""


@dataclass(frozen=True)
class Places:
    """Where runs can be at once. slots: the environment variables of each place. flags: what each run is told."""

    slots: Sequence[Mapping[str, str]]
    flags: Sequence[str]
    description: str


def choose_places(devices: DeviceFlags, multi: MultiDeviceFlags | None) -> Places:
    """One per GPU unless `--device` names one, several on the CPU, and a single one for runs on several devices."""
    if multi is not None:
        return Places([{}], [], "one after the other, each on all its devices")
    if pick_device(devices.device).type == "cpu":
        num_threads = devices.num_threads or 1
        num_slots = max(1, num_cores() // num_threads)
        threads = f"{num_threads} thread{'s' * (num_threads > 1)}"
        description = f"at most {num_slots} at a time on the CPU, each on {threads}"
        return Places([{}] * num_slots, ["--num-threads", str(num_threads)], description)
    if ":" in devices.device:
        return Places([{}], [], f"one after the other on {devices.device}")
    gpus = _visible_gpus()
    description = "one after the other on the GPU" if len(gpus) == 1 else f"one at a time on each of {len(gpus)} GPUs"
    return Places([{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus], [], description)


def _visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    count, chosen = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[:count] if chosen is not None else [str(i) for i in range(count)]


def train_several(flags: Flags, argv: Sequence[str], run_alone: RunAlone) -> int:
    """Trains what is not finished; returns the exit status. Raises BadInput."""
    # Before any run starts: a mistake in the data is one message then, and all of them find the data in the cache.
    task = build_task(flags)
    several, save_dir = flags.several, flags.checkpoint.save_dir
    folds = task.fold_flags(several.folds) if several.folds else []
    places = choose_places(flags.devices, flags.multi)
    planned = variants(several, flags.run.seed, save_dir, [*argv, *places.flags], folds)
    folders = [VariantFolder.of(variant, flags.multi is not None) for variant in planned]
    directory = RunDirectory(save_dir, flags.checkpoint.keep_checkpoints, say)
    try:
        directory.acquire(flags.checkpoint.take_over_lock)
        if directory.has_checkpoint:
            raise BadInput(f"--save-dir {save_dir}: holds a single run; {several.as_given} needs a folder for its runs")
        for folder in folders:
            if not flags.checkpoint.fresh:
                folder.refuse_another_run()
        return SeveralRuns(flags, task, directory, folders, places, run_alone).train()
    finally:
        directory.release()


@dataclass
class SeveralRuns:
    """The runs of one command, in a directory that is held."""

    flags: Flags
    task: Task
    directory: RunDirectory
    folders: Sequence[VariantFolder]
    places: Places
    run_alone: RunAlone
    stop: StopRequest = field(default_factory=StopRequest)

    def train(self) -> int:
        """Trains those that are not finished, and sums all up; returns the exit status."""
        self.stop.install()
        names = [folder.variant.name for folder in self.folders]
        finished = [f for f in self.folders if f.is_finished and not self.flags.checkpoint.fresh]
        already = f"; finished already: {len(finished)}" if finished else ""
        what = f"{self.flags.several.as_given}: {len(names)} runs in {self.directory.path}"
        say(f"{what}, {self.places.description}{already}")
        table = Table(self.task.headline, names)
        for folder in finished:
            table.run(folder.entry())
        status = self._train_rest(finished, table) if len(finished) < len(names) else 0
        if status != 0:
            return status
        summary = self._summary()
        if self.stop.signal_number is not None:
            return self._stopped(self.stop.signal_number)
        self.directory.write_json(SUMMARY, summary)
        table.conclusion(summary)
        return 0

    def _train_rest(self, finished: Sequence[VariantFolder], table: Table) -> int:
        """Returns 0 when all have finished; otherwise says what is the matter."""
        self.directory.discard(SUMMARY)
        rest = {folder.variant.directory: folder for folder in self.folders if folder not in finished}
        epochs, num_ended = self.flags.run.epochs, len(finished)

        def num_epochs_done() -> int:
            # Early stopping may have left a run fewer epochs; all of them count as done when it ends.
            return num_ended * epochs + sum(folder.epochs_done for folder in rest.values())

        def on_end(child: Child) -> None:
            nonlocal num_ended
            num_ended += 1
            folder = rest.pop(child.directory)
            table.run(folder.entry())
            if folder.changed:
                say(
                    f"{child.directory} was finished before, with {folder.changes_text()}; to train it anew choose "
                    "another --save-dir, or add --fresh"
                )

        children = [
            Child(directory, functools.partial(self.run_alone, folder.variant.argv))
            for directory, folder in rest.items()
        ]
        progress = Progress(len(self.folders) * epochs, num_epochs_done())
        try:
            failures = run_children(
                children,
                self.places.slots,
                self.stop,
                lambda running: progress.show(num_epochs_done(), [rest[c.directory].variant.name for c in running]),
                on_end,
            )
        finally:
            progress.close()
        if failures:
            print("\n".join(failure.message() for failure in failures), file=sys.stderr)
            return failures[0].status
        return self._stopped(self.stop.signal_number) if self.stop.signal_number is not None else 0

    def _stopped(self, signal_number: int) -> int:
        say("Stopped as asked; everything is saved. The same command goes on from here.")
        return 128 + signal_number

    def _summary(self) -> dict[str, Any]:
        """What summary.json is to hold.

        The ensemble is one of runs that differ in their seed alone, and is scored where they are: on the test set.
        """
        summary = summarise_runs([folder.entry() for folder in self.folders])
        before = self.directory.read_json(SUMMARY)
        if before.get("runs") == summary["runs"]:
            return before
        ensemble = None
        if self.flags.several.folds == 0 and self.flags.run.test:
            parallel = SingleDevice(self._device())
            set_up_torch(self.flags, parallel)
            directories = [folder.variant.directory for folder in self.folders]
            ensemble = ensemble_metrics(self.flags, self.task, directories, parallel, self.stop)
        return summary | {"ensemble": ensemble}

    def _device(self) -> torch.device:
        """That of this process."""
        device, multi = pick_device(self.flags.devices.device), self.flags.multi
        if multi is not None and multi.gpu_ids is not None and device.type == "cuda":
            return torch.device("cuda", multi.gpu_ids[0])
        return device


def summarise_runs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation of each metric that all of the runs have; every run counts alike."""
    names = [name for name in entries[0]["metrics"] if all(name in entry["metrics"] for entry in entries)]
    columns = {name: np.array([entry["metrics"][name] for entry in entries], dtype=np.float64) for name in names}
    return {
        "runs": list(entries),
        "mean": {name: float(column.mean()) for name, column in columns.items()},
        "deviation": {name: float(column.std(ddof=1)) for name, column in columns.items()},
    }
