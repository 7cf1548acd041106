"""What a run achieves on its devices: time and phases of a step, throughput, memory; of all its processes."""

import time
from statistics import median
from typing import Any

import torch

from trainer.loop.run import Run
from trainer.parallel.base import Parallel
from trainer.profiling.excerpt import train_steps
from trainer.profiling.memory import forget_peak, peak_memory_mib
from trainer.profiling.phases import (
    BACKWARD,
    COMMUNICATION,
    PHASES,
    Durations,
    PhaseClock,
    watched,
    without_gradient_exchange,
)
from trainer.profiling.timing import spread

NUM_TURNS = 5
"""Times that blocks of steps with and without the exchange of gradients take turns, to tell what it costs."""


def measure(run: Run, num_steps: int, num_settling_steps: int) -> dict[str, Any]:
    """Trains so many steps, the settling ones first, which do not count. All processes call it.

    Returns `steps` that were measured; `step_ms_mean`, `step_ms_median`, `step_ms_p10`, `step_ms_p90`;
    `samples_per_second` of all processes together; `phases` (for each of PHASES `ms_mean`, `ms_median`, `ms_p10`,
    `ms_p90`, `percent`); `world_size`, `num_devices`; `global_batch_size` of a full step, which is smaller than
    `requested_global_batch_size` where there are no more training samples; `samples_per_step` on average, for the last
    step of an epoch may be short; `gradient_bytes` of each parameter in the model's order; and under `ranks` of each
    process its `step_ms_mean`, `peak_memory_mib` and `phases_ms_mean`. Times at the top are of the main process.

    With several processes the exchange of gradients overlaps the backward pass. Its share of "communication" is what
    backward takes longer than without any exchange; to tell it, twice as many steps are trained once more.
    """
    train_steps(run, num_settling_steps)
    forget_peak(run.parallel.device)
    total, steps, wall_ms, num_samples = _measured(run, num_steps)
    num_steps = len(steps)
    means = {phase: value / num_steps for phase, value in total.items()}
    durations = [sum(step.values()) for step in steps]
    step_ms = wall_ms / num_steps
    return {
        "steps": num_steps,
        "step_ms_mean": step_ms,
        **spread("step", durations),
        "samples_per_second": 1e3 * num_samples / wall_ms,
        "phases": {
            phase: {
                "ms_mean": means[phase],
                **spread("", [step[phase] for step in steps]),
                "percent": 100 * means[phase] / sum(means.values()),
            }
            for phase in PHASES
        },
        "world_size": run.parallel.shard[1],
        "num_devices": run.parallel.num_devices,
        "global_batch_size": min(run.batches.global_batch_size, max(run.plan.phase_sizes)),
        "requested_global_batch_size": run.batches.global_batch_size,
        "samples_per_step": num_samples / num_steps,
        "gradient_bytes": [p.nbytes for p in run.objective.parameters() if p.requires_grad],
        "ranks": _of_every_rank(run.parallel, step_ms, means),
    }


def _measured(run: Run, num_steps: int) -> tuple[Durations, list[Durations], float, int]:
    """Each phase's time, the same of every step, wall time in ms, and samples."""
    with watched(run) as clock:
        measured = _block(run, clock, num_steps)
        if run.parallel.shard[1] > 1:
            _set_apart_communication(run, clock, *measured[:2])
    return measured


def _block(run: Run, clock: PhaseClock, num_steps: int) -> tuple[Durations, list[Durations], float, int]:
    _wait_for(run.parallel.device)
    started = time.perf_counter()
    clock.start()
    num_samples = train_steps(run, num_steps)
    total, steps = clock.stop()
    _wait_for(run.parallel.device)
    return total, steps, 1e3 * (time.perf_counter() - started), num_samples


def _set_apart_communication(run: Run, clock: PhaseClock, total: Durations, steps: list[Durations]) -> None:
    """Moves the share of the exchange from backward to communication, in the sum and in every step.

    It is what backward takes longer with the exchange than without; for that, blocks of steps take turns once more.
    """
    size = max(1, len(steps) // NUM_TURNS)
    together_ms: list[float] = []
    alone_ms: list[float] = []
    for _ in range(NUM_TURNS):
        together_ms += [step[BACKWARD] for step in _block(run, clock, size)[1]]
        with without_gradient_exchange(run):
            alone_ms += [step[BACKWARD] for step in _block(run, clock, size)[1]]
    share = max(0.0, 1 - median(alone_ms) / median(together_ms))
    for durations in (total, *steps):
        exposed = share * durations[BACKWARD]
        durations[BACKWARD] -= exposed
        durations[COMMUNICATION] += exposed


def _of_every_rank(parallel: Parallel, step_ms: float, means: Durations) -> list[dict[str, Any]]:
    rank, world_size = parallel.shard
    table = torch.zeros(world_size, 2 + len(PHASES), dtype=torch.float64)
    table[rank] = torch.tensor([step_ms, peak_memory_mib(parallel.device), *(means[phase] for phase in PHASES)])
    return [
        {"step_ms_mean": row[0], "peak_memory_mib": row[1], "phases_ms_mean": dict(zip(PHASES, row[2:], strict=True))}
        for row in parallel.sum(table).tolist()
    ]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
