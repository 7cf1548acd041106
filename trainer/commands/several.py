"""Runs `--seeds` and `--folds`: trains several runs and summarises their metrics.

Each run has its own command line and folder, so a user can resume or repeat a single run.
"""

import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import MANIFEST, RESULTS, read_json, read_manifest, read_state, retention_of
from trainer.commands.build import build_task
from trainer.commands.evaluate import ensemble_metrics
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.commands.resume import changed_since_last_start, differences
from trainer.common.errors import UserError
from trainer.common.files import with_nan, without_nan
from trainer.common.process import to_stderr
from trainer.config import refuse, shown
from trainer.failure.signals import StopRequest
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.logs.console import Progress, SummaryTable, say
from trainer.loop.windows import StopRequested
from trainer.parallel.devices import pick_device, usable_cores
from trainer.parallel.launch import Launcher, exit_status
from trainer.task import Task

SUMMARY = "summary.json"
POLL_INTERVAL_S = 0.5

RunAlone = Callable[[Sequence[str]], int]
"""Picklable function that runs a command line and returns its exit status."""


@dataclass(frozen=True)
class Job:
    """One of several runs; its properties read the run's folder.

    name: the run's folder within `--save-dir`, such as "fold-1/seed-0". fold: number of the fold, from 1; None without
    `--folds`. hold_out: flags that choose the held-out data. config: all flags, as in config.json. run: picklable
    function that trains the run and returns the exit status.
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
        """Path of the process's error output, next to the run's folder; the file may not exist."""
        return self.directory.with_name(f"{self.directory.name}.stderr")

    def num_done(self, in_steps: bool) -> int:
        with suppress(OSError):
            for newest in read_manifest(self.directory / MANIFEST)[-1:]:
                return newest.step if in_steps else newest.epoch
        return 0

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Flags that have changed since the run's last start, with (then, now) values."""
        return changed_since_last_start(self.directory, self.config)

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished and its flags are unchanged since its last start."""
        return bool(read_json(self.directory / RESULTS)) and not self.changed

    def refuse_another_run(self) -> None:
        for name, values in self.changed.items():
            if name == "--seed" or name in self.hold_out:
                then, now = map(shown, values)
                raise UserError(
                    f"--save-dir {self.directory}: contains a run with {name} {then}, not {now}; choose another "
                    "--save-dir, or start over with --fresh"
                )

    def entry(self) -> dict[str, Any]:
        results = read_json(self.directory / RESULTS)
        return {
            "directory": self.name,
            "seed": self.seed,
            "fold": self.fold,
            "metrics": with_nan(results["metrics"]),
            "train_seconds": results["train_seconds"],
        }

    def failure_message(self, status: int) -> str:
        said = self.stderr.read_text(errors="replace").splitlines() if self.stderr.exists() else []
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        if errors:
            return "\n".join(f"error: {self.directory}: {line}" for line in errors)
        how = f"ended with status {status}"
        if status > 128:
            how = f"was stopped by signal {status - 128}; the same command resumes from its last checkpoint"
        return "\n".join([f"error: {self.directory}: {how}", *said])


def plan_jobs(flags: Flags, argv: Sequence[str], folds: Sequence[Sequence[str]], run_alone: RunAlone) -> list[Job]:
    """Returns all runs, fold by fold. Raises UserError if the command line of a run is invalid.

    argv: the complete command line; each run appends its own flags, which override earlier flags. folds: for each fold,
    the flags that hold it out; empty without `--folds`.
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
            # as config.json stores it, with lists instead of tuples
            config = json.loads(json.dumps(own_flags.values()))
            run = functools.partial(run_alone, own_argv)
            jobs.append(Job(name, directory, seed, fold, hold_out, config, run))
    return jobs


@dataclass(frozen=True)
class Slots:
    """Slots that each run one job at a time. variables: each slot's environment variables. flags: added to each job."""

    variables: Sequence[Mapping[str, str]]
    flags: Sequence[str]
    description: str


def choose_slots(devices: DeviceFlags, multi: MultiDeviceFlags | None) -> Slots:
    """Chooses one slot per GPU, several slots on the CPU, or one slot for `--device cuda:N` and multi-device runs."""
    if multi is not None:
        return Slots([{}], [], "one after the other, each on all its devices")
    if pick_device(devices.device).type == "cpu":
        num_threads = devices.num_threads or 1
        num_slots = max(1, len(usable_cores()) // num_threads)
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
    """Runs all jobs; after a failure or a stop request, starts no further job.

    slots: environment variables of each slot. At least twice a second, yields the running jobs, and (job, exit status)
    for each job that ended meanwhile.
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


def train_several(flags: Flags, argv: Sequence[str], run_alone: RunAlone) -> int:
    """Trains the unfinished runs of `--seeds` or `--folds`; returns the exit status. Raises UserError."""
    for remark in flags.from_run.remarks:
        say(remark)
    # before any run starts, so that a data error is reported once, and all runs find the data in the cache
    task = build_task(flags)
    several, save_dir = flags.several, flags.checkpoint.save_dir
    if not task.trains:
        raise UserError(f"{several.as_given}: trains models, but the other flags train nothing; leave the flag out")
    folds = task.fold_flags(several.folds) if several.folds else []
    slots = choose_slots(flags.devices, flags.multi)
    jobs = plan_jobs(flags, [*argv, *flags.from_run.argv, *slots.flags], folds, run_alone)
    directory = RunDirectory(save_dir, retention_of(flags.checkpoint, task), say)
    try:
        directory.acquire()
        if directory.has_checkpoint:
            raise UserError(
                f"--save-dir {save_dir}: contains a single run; choose another folder for {several.as_given}"
            )
        for job in jobs if not flags.checkpoint.fresh else []:
            job.refuse_another_run()
        return SeveralRuns(flags, task, jobs, slots, directory).train()
    finally:
        directory.release()


@dataclass
class SeveralRuns:
    """The runs of one command, in a `--save-dir` that this process has locked."""

    flags: Flags
    task: Task
    jobs: Sequence[Job]
    slots: Slots
    directory: RunDirectory

    def train(self) -> int:
        """Trains unfinished runs and writes the summary; returns the exit status."""
        finished = [job for job in self.jobs if job.is_finished and not self.flags.checkpoint.fresh]
        unfinished = [job for job in self.jobs if job not in finished]
        already = f"; finished already: {len(finished)}" if finished else ""
        what = f"{self.flags.several.as_given}: {len(self.jobs)} runs in {self.flags.checkpoint.save_dir}"
        say(f"{what}, {self.slots.description}{already}")
        table = SummaryTable(self.task.headline, [job.name for job in self.jobs])
        for job in finished:
            table.run(job.entry())
        with Launcher() as launcher:
            failures = self._train(unfinished, launcher, table) if unfinished else []
            for job, status in failures:
                to_stderr(job.failure_message(status))
            if failures:
                return failures[0][1]
            if unfinished and not launcher.stop:
                paused = ", ".join(job.name for job in unfinished)
                say(
                    f"--max-minutes {self.flags.run.max_minutes:g}: time is up for {len(unfinished)} of "
                    f"{len(self.jobs)} runs ({paused}), so there is no summary yet; to continue them, raise "
                    "--max-minutes or leave it out"
                )
                return 0
            summary: dict[str, Any] = {}
            if not launcher.stop:
                with suppress(StopRequested):
                    summary = self._summary(launcher.stop)
            if launcher.stop:
                say("Stopped as asked; everything is saved. The same command resumes from here.")
                return launcher.stop.exit_status
        self.directory.write_json(SUMMARY, summary)
        table.conclusion(summary)
        return 0

    def _train(self, unfinished: list[Job], launcher: Launcher, table: SummaryTable) -> list[tuple[Job, int]]:
        """Trains runs and removes finished runs from `unfinished`; returns failed runs with their exit statuses."""
        self.directory.delete(SUMMARY)
        failures = []
        in_steps = self.flags.run.max_steps is not None
        length = 1 if self.task.fitted else self.flags.run.max_steps or self.flags.run.epochs or 0

        def num_done() -> int:
            # a finished run counts in full, even if it stopped early
            num_ended = len(self.jobs) - len(unfinished)
            return num_ended * length + sum(job.num_done(in_steps) for job in unfinished)

        unit = "runs" if self.task.fitted else "steps" if in_steps else "epochs"
        with closing(Progress(len(self.jobs) * length, num_done(), unit)) as progress:
            for running, ended in run_jobs(launcher, unfinished, self.slots.variables):
                for job, status in ended:
                    if status == 0 and read_state(job.directory) != "paused":
                        unfinished.remove(job)
                        table.run(job.entry())
                        if others := differences(job.changed):
                            advice = "to retrain it, choose another --save-dir or add --fresh"
                            say(f"The run in {job.directory} finished earlier with {others}; {advice}")
                    elif status not in (0, launcher.stop.exit_status):
                        failures.append((job, status))
                progress.show(num_done(), [job.name for job in running])
        return failures

    def _summary(self, stop: StopRequest) -> dict[str, Any]:
        """Builds the content of summary.json.

        Runs that differ only in their seeds form an ensemble, which is evaluated on the test set.
        """
        summary = summarise_runs([job.entry() for job in self.jobs])
        before = read_json(self.flags.checkpoint.save_dir / SUMMARY)
        if before.get("runs") == without_nan(summary["runs"]):
            scored = before.get("ensemble")
            return summary | {"ensemble": scored and with_nan(scored)}
        ensemble = None
        if self.flags.several.folds == 0 and not self.flags.run.no_test and "test" in self.task.splits():
            ensemble = ensemble_metrics(self.flags, self.task, [job.directory for job in self.jobs], stop)
        return summary | {"ensemble": ensemble}


def summarise_runs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the mean and sample standard deviation of each metric common to all runs."""
    names = [name for name in entries[0]["metrics"] if all(name in entry["metrics"] for entry in entries)]
    columns = {name: np.array([entry["metrics"][name] for entry in entries], dtype=np.float64) for name in names}
    return {
        "runs": list(entries),
        "mean": {name: float(column.mean()) for name, column in columns.items()},
        "deviation": {name: float(column.std(ddof=1)) for name, column in columns.items()},
    }
