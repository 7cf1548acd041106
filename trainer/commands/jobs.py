"""The runs that `--seeds` and `--folds` ask for: ordinary command lines, each with a folder of its own.

Where they can be at once, and running them there: one per slot at a time.
"""

import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.manifest import MANIFEST, RESULTS, read_json, read_manifest
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.commands.resume import changed_since_last_start, differences
from trainer.commands.state import read_state
from trainer.common.errors import UserError
from trainer.common.files import with_nan
from trainer.config import refuse, shown
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.logs.console import say
from trainer.parallel.devices import num_cores, pick_device
from trainer.parallel.launch import Launcher, exit_status

POLL_INTERVAL_S = 0.5

RunAlone = Callable[[Sequence[str]], int]
"""Runs one command line and returns its exit status; picklable."""


@dataclass(frozen=True)
class Job:
    """One of several runs, and what its folder tells about it without starting it.

    name: its folder below that of all runs, for example "fold-1/seed-0". fold: from 1 on; None without folds.
    hold_out: those of its flags that say what is held out. config: all of its flags, as config.json holds them. run:
    trains it and returns the exit status; picklable.
    """

    name: str
    directory: Path
    seed: int
    fold: int | None
    hold_out: Sequence[str]
    config: Mapping[str, Any]
    run: Callable[[], int]

    @property
    def stderr(self) -> Path:
        """Where it complains: beside its folder, which it may still refuse to make or move the contents of."""
        return self.directory.with_name(f"{self.directory.name}.stderr")

    def num_done(self, in_steps: bool) -> int:
        """Optimizer steps, or completed epochs."""
        try:
            entries = read_manifest(self.directory / MANIFEST)
        except OSError:
            return 0
        if not entries:
            return 0
        return entries[-1].step if in_steps else entries[-1].epoch

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Flags that differ from those that the run was last started with, if it was: (then, now)."""
        return changed_since_last_start(self.directory, self.config)

    @property
    def is_finished(self) -> bool:
        """Whether it needs no process. One with other flags does: it may have to go on, which is for the run to say."""
        return bool(read_json(self.directory / RESULTS)) and not self.changed

    @property
    def is_paused(self) -> bool:
        """Whether it has used up its time before it was through."""
        return read_state(self.directory) == "paused"

    def refuse_another_run(self) -> None:
        """Raises UserError when the folder holds a run with another seed, or one that holds out something else."""
        for name, values in self.changed.items():
            if name == "--seed" or name in self.hold_out:
                then, now = map(shown, values)
                raise UserError(
                    f"--save-dir {self.directory}: holds a run with {name} {then}, not {now}; choose another "
                    "--save-dir, or start over with --fresh"
                )

    def tell_changes(self) -> None:
        """For one that was finished before, with other flags."""
        others = differences(self.changed)
        if others:
            say(
                f"{self.directory} was finished before, with {others}; to train it anew choose another "
                "--save-dir, or add --fresh"
            )

    def entry(self) -> dict[str, Any]:
        """What summary.json says of it once it is finished; "directory" is below that of all runs."""
        results = read_json(self.directory / RESULTS)
        which = {"directory": self.name, "seed": self.seed, "fold": self.fold}
        return {**which, "metrics": with_nan(results["metrics"]), "train_seconds": results["train_seconds"]}

    def failure_message(self, status: int) -> str:
        """What it had to say when it failed, under its name."""
        said = self.stderr.read_text(errors="replace").splitlines() if self.stderr.exists() else []
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        if errors:
            return "\n".join(f"error: {self.directory}: {line}" for line in errors)
        how = f"ended with status {status}"
        if status > 128:
            how = f"was stopped by signal {status - 128}; the same command goes on from its last checkpoint"
        return "\n".join([f"error: {self.directory}: {how}", *said])


def plan_jobs(flags: Flags, argv: Sequence[str], folds: Sequence[Sequence[str]], run_alone: RunAlone) -> list[Job]:
    """Every run that is asked for, fold by fold. Raises UserError for a command line that a run would refuse.

    argv: the whole command line; what differs is appended, since of a flag given twice the last one counts. folds: the
    flags that hold out each fold; empty without folds.
    """
    several, first_seed = flags.several, flags.run.seed
    numbered: list[tuple[int | None, Sequence[str]]] = [*enumerate(folds, start=1)]
    jobs = []
    for fold, hold_out in numbered or [(None, ())]:
        for seed in range(first_seed, first_seed + several.seeds):
            name = "/".join([f"fold-{fold}"] * (fold is not None) + [f"seed-{seed}"] * (several.seeds > 1))
            directory = flags.checkpoint.save_dir / name
            own = ["--seeds", "1", "--folds", "0", "--seed", str(seed), "--save-dir", str(directory), *hold_out]
            own_argv = [*argv, *own, *["--no-test"] * (fold is not None)]
            own_flags, problems = parse(own_argv, flags.multi is not None)
            refuse(problems)
            # By way of JSON, which has no tuples.
            config = json.loads(json.dumps(own_flags.values()))
            run = functools.partial(run_alone, own_argv)
            jobs.append(Job(name, directory, seed, fold, hold_out, config, run))
    return jobs


# --- where, and when ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """variables: the environment variables of each slot. flags: what every run is told."""

    variables: Sequence[Mapping[str, str]]
    flags: Sequence[str]
    description: str


def choose_slots(devices: DeviceFlags, multi: MultiDeviceFlags | None) -> Slots:
    """One per GPU unless `--device` names one, several on the CPU, and a single one for runs on several devices."""
    if multi is not None:
        return Slots([{}], [], "one after the other, each on all its devices")
    if pick_device(devices.device).type == "cpu":
        num_threads = devices.num_threads or 1
        num_slots = max(1, num_cores() // num_threads)
        threads = f"{num_threads} thread{'s' * (num_threads > 1)}"
        description = f"at most {num_slots} at a time on the CPU, each on {threads}"
        return Slots([{}] * num_slots, ["--num-threads", str(num_threads)], description)
    if ":" in devices.device:
        return Slots([{}], [], f"one after the other on {devices.device}")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = chosen.split(",") if chosen is not None else [str(i) for i in range(torch.cuda.device_count())]
    variables = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus][: torch.cuda.device_count()]
    several = f"one at a time on each of {len(variables)} GPUs"
    return Slots(variables, [], several if len(variables) > 1 else "one after the other on the GPU")


def run_jobs(
    launcher: Launcher, jobs: Sequence[Job], slots: Sequence[Mapping[str, str]]
) -> Iterator[tuple[list[Job], list[tuple[Job, int]]]]:
    """Runs all of them; after a failure or a request to stop none is started.

    slots: the environment variables of each. Yields a few times a second those that run, and those that have ended
    since with their exit statuses.
    """
    waiting, free = deque(jobs), list(slots)
    running: dict[SpawnProcess, tuple[Job, Mapping[str, str]]] = {}
    while waiting or running:
        while waiting and free:
            job, slot = waiting.popleft(), free.pop(0)
            running[launcher.start(job.run, slot, job.stderr)] = job, slot
        ended = []
        for process, exit_code in launcher.wait(POLL_INTERVAL_S).items():
            job, slot = running.pop(process)
            free.append(slot)
            ended.append((job, exit_status(exit_code)))
            if job.stderr.stat().st_size == 0:
                job.stderr.unlink()
        if launcher.stop or any(status for _, status in ended):
            waiting.clear()
        yield [job for job, _ in running.values()], ended
