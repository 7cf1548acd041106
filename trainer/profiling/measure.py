"""Measures steps of a real run: step time by phase, throughput and memory."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import retention_of
from trainer.commands.build import build_run, build_task, open_run, set_up_torch, start_loading
from trainer.commands.flags import Flags
from trainer.common.errors import UserError
from trainer.config import FlagGroup, flag
from trainer.loading.order import Position
from trainer.loop.plan import SampleOrder
from trainer.loop.run import Run
from trainer.loop.train import train_epoch
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.profiling.meters import forget_peak, peak_memory_mib, spread
from trainer.profiling.phase_clock import BACKWARD, COMMUNICATION, PHASES, PhaseClock, replaced, watched
from trainer.task import Task

NUM_TURNS = 5
"""Number of measurements with gradient all-reduce, and of measurements without; the two kinds alternate."""


@dataclass
class MeasuringFlags(FlagGroup):
    """Common flags of step measurements"""

    steps: int = flag(50, "optimizer steps per measurement", at_least=1)
    settling_steps: int = flag(10, "untimed warm-up steps before each measurement", at_least=1)
    json: Path | None = flag(None, "also write the results to this file", metavar="FILE", from_record="refused")


@contextmanager
def opened(
    flags: Flags, argv: Sequence[str], strategy: Strategy, task: Task | None = None, quiet: bool = False
) -> Iterator[Run]:
    """Context manager that opens a new run in a temporary folder. Raises UserError if training has no steps.

    task: a task with its data loaded; None builds one. quiet: whether to suppress the run's first lines.
    """
    if task is None:
        set_up_torch(flags, strategy.group)
        task = strategy.group.together(lambda: build_task(flags))
    if task.fitted:
        raise UserError(
            f"--task {flags.run.task}: with these flags its model is fitted without optimizer steps, so there is "
            "nothing to measure; choose another model"
        )
    with ExitStack() as leaving:
        folder = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-profile-")))
        run_flags, checkpoint = replace(flags.run, max_minutes=0.0), replace(flags.checkpoint, save_dir=folder)
        flags = replace(flags, run=run_flags, checkpoint=checkpoint)
        directory = RunDirectory(folder, retention_of(flags.checkpoint, task), print)
        strategy.group.on_main(directory.acquire)
        leaving.callback(directory.release)
        if quiet:
            leaving.enter_context(redirect_stdout(leaving.enter_context(open(os.devnull, "w"))))
        loading = start_loading(flags, task, strategy, trains=True)
        leaving.callback(loading[0].close)
        run, notes = build_run(flags, task, strategy, directory, loading)
        leaving.callback(run.close)
        open_run(run, notes, flags, argv)
        leaving.enter_context(run.learner.launching())
        yield run


def with_at_most(order: SampleOrder, most: int) -> SampleOrder:
    """Limits a sample order to `most` samples per epoch."""
    return replace(order, size=min(order.size, most))


@dataclass
class MeasuredRun:
    """Measures steps of a run without saving it. All processes must call each method together."""

    run: Run

    def train(self, num_steps: int) -> int:
        """Trains for `num_steps` optimizer steps; returns the number of samples over all processes.

        Uses the real training loop with shortened epochs. With several phases, trains each for at most `num_steps`
        steps. Raises UserError if training diverges.
        """
        run = self.run
        whole = run.plan
        num_samples = num_done = 0
        while num_done < num_steps:
            most = [(num_steps - num_done) * order.global_batch_size for order in whole.orders]
            orders = tuple(map(with_at_most, whole.orders, most))
            run.plan = replace(whole, orders=orders, epochs=whole.epochs or 1, max_steps=None, eval_every_steps=None)
            run.progress.position = Position()
            train_epoch(run)
            num_samples += run.plan.samples_per_epoch
            num_done += run.plan.steps_per_epoch
        run.plan = whole
        return num_samples

    def measure(self, num_steps: int, num_settling_steps: int) -> dict[str, Any]:
        """Trains for `num_settling_steps` steps, then measures `num_steps` steps. Returns these entries:

        steps: number of measured steps.
        step_ms_mean, step_ms_median, step_ms_p10, step_ms_p90: time of a step on rank 0.
        samples_per_second: throughput of all processes.
        phases: `ms_mean`, `ms_median`, `ms_p10`, `ms_p90` and `percent` of each of PHASES on rank 0.
        world_size, num_devices: numbers of processes and of devices.
        global_batch_size: samples of a full step; below requested_global_batch_size if training samples run out.
        samples_per_step: mean over steps, since the last step of an epoch may be smaller.
        ranks: `step_ms_mean`, `peak_memory_mib` and `phases_ms_mean` of each process.
        """
        strategy, group, split = self.run.strategy, self.run.group, self.run.memory.splits[0]
        self.train(num_settling_steps)
        forget_peak(*strategy.group.devices)
        ms, num_samples = self.timed(num_steps)
        if strategy.overlaps:
            exposed = self.exposed_share(len(ms)) * ms[:, PHASES.index(BACKWARD)]
            ms[:, PHASES.index(BACKWARD)] -= exposed
            ms[:, PHASES.index(COMMUNICATION)] += exposed
        step_ms, means = float(ms.sum()) / len(ms), ms.mean(axis=0)
        return {
            "steps": len(ms),
            "step_ms_mean": step_ms,
            **spread("step_", ms.sum(axis=1)),
            "samples_per_second": 1e3 * num_samples / float(ms.sum()),
            "phases": {
                phase: {"ms_mean": mean, **spread("", durations), "percent": 100 * mean / step_ms}
                for phase, mean, durations in zip(PHASES, means.tolist(), ms.T, strict=True)
            },
            "world_size": group.world_size,
            "num_devices": strategy.num_devices,
            "global_batch_size": min(split.global_batch_size, self.run.plan.phase_sizes[0]),
            "requested_global_batch_size": split.global_batch_size,
            "samples_per_step": num_samples / len(ms),
            "ranks": of_every_rank(group, step_ms, means),
        }

    def timed(self, num_steps: int) -> tuple[np.ndarray, int]:
        """Measures steps; returns milliseconds by step and phase, and the number of samples over all processes."""
        with self.watched() as clock:
            num_samples = self.train(num_steps)
            return clock.stop(), num_samples

    def exposed_share(self, num_steps: int) -> float:
        """Returns the fraction of the backward pass spent waiting for the overlapped gradient all-reduce.

        Measures alternating groups of steps with and without all-reduce, and compares their backward times. The
        learning rate is 0 meanwhile, because steps without all-reduce would make the processes' weights differ.
        """
        run, size = self.run, max(1, num_steps // NUM_TURNS)
        sync = run.strategy.gradient_sync
        together, alone = [], []
        rate, run.learning_rate = run.learning_rate, replace(run.learning_rate, factor_of_step=lambda *_: 0.0)
        for _ in range(NUM_TURNS):
            together.append(self.timed(size)[0])
            with (
                replaced(run.strategy, "gradient_sync", lambda net, enabled: sync(net, False)),
                replaced(run.strategy, "exchange", lambda params: None),
            ):
                alone.append(self.timed(size)[0])
        run.learning_rate = rate
        together_ms, alone_ms = (median(np.concatenate(ms)[:, PHASES.index(BACKWARD)]) for ms in (together, alone))
        return max(0.0, 1 - alone_ms / together_ms)

    def trace(self, num_steps: int, folder: Path) -> Path:
        """Trains for `num_steps` steps under torch.profiler; returns the path of this process's trace.

        The trace contains the loop's phases as named spans. Raises OSError if the trace cannot be written.
        """
        with self.watched(spans=True) as clock, torch.profiler.profile() as profile:
            self.train(num_steps)
            clock.stop()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_rank{self.run.group.rank}.{os.getpid()}.pt.trace.json"
        profile.export_chrome_trace(str(path))
        return path

    def watched(self, spans: bool = False) -> AbstractContextManager[PhaseClock]:
        """Returns the context `phase_clock.watched` for this run."""
        return watched(self.run.strategy, self.run.learner, self.run.log, spans)


def measure_run(flags: Flags, argv: Sequence[str], strategy: Strategy) -> dict[str, Any]:
    """Opens a run, measures as many steps as the flags request, and returns the results of `MeasuredRun.measure`."""
    with opened(flags, argv, strategy, quiet=True) as run:
        return MeasuredRun(run).measure(flags.tool.steps, flags.tool.settling_steps)


def of_every_rank(group: Group, step_ms: float, means: np.ndarray) -> list[dict[str, Any]]:
    """Returns times and peak memory of each process. means: milliseconds of this process by phase."""
    rank, world_size = group.rank, group.world_size
    table = torch.zeros(world_size, 2 + len(PHASES), dtype=torch.float64)
    table[rank] = torch.tensor([step_ms, peak_memory_mib(*group.devices), *means])
    return [
        {"step_ms_mean": row[0], "peak_memory_mib": row[1], "phases_ms_mean": dict(zip(PHASES, row[2:], strict=True))}
        for row in group.sum(table).tolist()
    ]
