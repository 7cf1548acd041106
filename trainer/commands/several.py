"""`--seeds` and `--folds`: trains several runs, and reports on them together.

Each is an ordinary run in a folder of its own, so that it goes on where it was, and can be repeated by hand.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import read_json, retention_of
from trainer.commands.build import build_task
from trainer.commands.evaluate import ensemble_metrics
from trainer.commands.flags import Flags
from trainer.commands.jobs import Job, RunAlone, Slots, choose_slots, plan_jobs, run_jobs
from trainer.common.errors import UserError
from trainer.common.files import with_nan, without_nan
from trainer.common.process import to_stderr
from trainer.logs.console import Progress, SummaryTable, say
from trainer.loop.windows import StopRequested
from trainer.parallel.launch import Launcher
from trainer.parallel.signals import StopRequest
from trainer.task import Task

SUMMARY = "summary.json"


def train_several(flags: Flags, argv: Sequence[str], run_alone: RunAlone) -> int:
    """Trains what is not finished; returns the exit status. Raises UserError."""
    for remark in flags.from_run.remarks:
        say(remark)
    # Before any run starts: a mistake in the data is one message then, and all of them find the data in the cache.
    task = build_task(flags)
    several, save_dir = flags.several, flags.checkpoint.save_dir
    if not task.trains:
        raise UserError(
            f"{several.as_given}: these flags train nothing, of which several runs could be made; leave it out"
        )
    folds = task.fold_flags(several.folds) if several.folds else []
    slots = choose_slots(flags.devices, flags.multi)
    jobs = plan_jobs(flags, [*argv, *flags.from_run.argv, *slots.flags], folds, run_alone)
    directory = RunDirectory(save_dir, retention_of(flags.checkpoint, task), say)
    try:
        directory.acquire()
        if directory.has_checkpoint:
            raise UserError(
                f"--save-dir {save_dir}: holds a single run; {several.as_given} needs a folder for its runs"
            )
        for job in jobs if not flags.checkpoint.fresh else []:
            job.refuse_another_run()
        return SeveralRuns(flags, task, jobs, slots, directory).train()
    finally:
        directory.release()


@dataclass
class SeveralRuns:
    """The runs of one command, in `--save-dir`, which is held."""

    flags: Flags
    task: Task
    jobs: Sequence[Job]
    slots: Slots
    directory: RunDirectory

    def train(self) -> int:
        """Trains those that are not finished, and sums all up; returns the exit status."""
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
                self._tell_paused(unfinished)
                return 0
            summary: dict[str, Any] = {}
            if not launcher.stop:
                with suppress(StopRequested):
                    summary = self._summary(launcher.stop)
            if launcher.stop:
                say("Stopped as asked; everything is saved. The same command goes on from here.")
                return launcher.stop.exit_status
        self.directory.write_json(SUMMARY, summary)
        table.conclusion(summary)
        return 0

    def _train(self, unfinished: list[Job], launcher: Launcher, table: SummaryTable) -> list[tuple[Job, int]]:
        """Takes those that finish out of `unfinished`; returns those that fail, with their exit statuses."""
        self.directory.delete(SUMMARY)
        failures = []
        in_steps = self.flags.run.max_steps is not None
        length = self.flags.run.max_steps or self.flags.run.epochs or 0

        def num_done() -> int:
            # Early stopping may have left a run fewer of them; all count as done when it ends.
            num_ended = len(self.jobs) - len(unfinished)
            return num_ended * length + sum(job.num_done(in_steps) for job in unfinished)

        unit = "steps" if in_steps else "epochs"
        with closing(Progress(len(self.jobs) * length, num_done(), unit)) as progress:
            for running, ended in run_jobs(launcher, unfinished, self.slots.variables):
                for job, status in ended:
                    if status == 0 and not job.is_paused:
                        unfinished.remove(job)
                        table.run(job.entry())
                        job.tell_changes()
                    elif status not in (0, launcher.stop.exit_status):
                        failures.append((job, status))
                progress.show(num_done(), [job.name for job in running])
        return failures

    def _tell_paused(self, paused: Sequence[Job]) -> None:
        say(
            f"--max-minutes {self.flags.run.max_minutes:g}: used up by {len(paused)} of {len(self.jobs)} runs before "
            f"they were through, so there is no summary: {', '.join(job.name for job in paused)}; to train them on "
            "raise it or leave it out"
        )

    def _summary(self, stop: StopRequest) -> dict[str, Any]:
        """What summary.json is to hold.

        The ensemble is one of runs that differ in their seed alone, and is scored where they are: on the test set.
        """
        summary = summarise_runs([job.entry() for job in self.jobs])
        before = read_json(self.flags.checkpoint.save_dir / SUMMARY)
        if before.get("runs") == without_nan(summary["runs"]):
            scored = before.get("ensemble")
            return summary | {"ensemble": scored and with_nan(scored)}
        ensemble = None
        if self.flags.several.folds == 0 and not self.flags.run.no_test:
            ensemble = ensemble_metrics(self.flags, self.task, [job.directory for job in self.jobs], stop)
        return summary | {"ensemble": ensemble}


def summarise_runs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation of each metric that all of the runs have; every run counts alike."""
    names = [name for name in entries[0]["metrics"] if all(name in entry["metrics"] for entry in entries)]
    columns = {name: np.array([entry["metrics"][name] for entry in entries], dtype=np.float64) for name in names}
    return {
        "runs": list(entries),
        "mean": {name: float(column.mean()) for name, column in columns.items()},
        "deviation": {name: float(column.std(ddof=1)) for name, column in columns.items()},
    }
