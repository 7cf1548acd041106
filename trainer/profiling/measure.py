"""What a run achieves on its devices: time and phases of a step, throughput, memory; of all its processes."""

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from trainer.parallel import Parallel
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
from trainer.run import Run

NUM_BLOCKS = 5
"""Parts of a measurement, between which the ones without exchange of gradients take their turns."""


def measure(run: Run, num_steps: int, num_settling_steps: int) -> dict[str, Any]:
    """Trains so many steps, the settling ones first, which do not count. All processes call it.

    Returns `steps` that were measured; `step_ms_mean`, `step_ms_median`, `step_ms_p10`, `step_ms_p90`;
    `samples_per_second` of all processes together; `phases` (for each of PHASES `ms_mean`, `ms_median`, `ms_p10`,
    `ms_p90`, `percent`); `world_size`, `num_devices`, `global_batch_size`; `gradient_bytes` of each parameter in the
    model's order; and under `ranks` of each process its `step_ms_mean`, `peak_memory_mib` and `phases_ms_mean`. Times
    at the top are of the main process.

    With several processes the exchange of gradients overlaps the backward pass. Its share of "communication" is what
    backward takes longer than without any exchange, which every other block of steps is trained for.
    """
    train_steps(run, num_settling_steps)
    forget_peak(run.parallel.device)
    total, steps, wall_ms, num_samples = _measured_blocks(run, num_steps)
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
        "global_batch_size": run.batches.global_batch_size,
        "gradient_bytes": [p.nbytes for p in run.objective.parameters() if p.requires_grad],
        "ranks": _of_every_rank(run.parallel, step_ms, means),
    }


def _measured_blocks(run: Run, num_steps: int) -> tuple[Durations, list[Durations], float, int]:
    """Of the blocks together: each phase's time, the same of every step, wall time in ms, and samples."""
    exchanges = run.parallel.shard[1] > 1
    num_blocks = min(NUM_BLOCKS, num_steps) if exchanges else 1
    total, steps, wall_ms, num_samples = dict.fromkeys(PHASES, 0.0), [], 0.0, 0
    alone_ms: list[float] = []
    with watched(run) as clock:
        for block in range(num_blocks):
            size = num_steps * (block + 1) // num_blocks - num_steps * block // num_blocks
            part, of_steps, duration, samples = _block(run, clock, size)
            total = {phase: total[phase] + part[phase] for phase in PHASES}
            steps += of_steps
            wall_ms += duration
            num_samples += samples
            if exchanges:
                _, of_steps, _, _ = _block(run, clock, size, exchange=False)
                alone_ms += [step[BACKWARD] for step in of_steps]
    if exchanges:
        _set_apart_communication(total, steps, alone_ms)
    return total, steps, wall_ms, num_samples


def _block(
    run: Run, clock: PhaseClock, num_steps: int, exchange: bool = True
) -> tuple[Durations, list[Durations], float, int]:
    with nullcontext() if exchange else without_gradient_exchange(run):
        _wait_for(run.parallel.device)
        started = time.perf_counter()
        clock.start()
        num_samples = train_steps(run, num_steps)
        total, steps = clock.stop()
        _wait_for(run.parallel.device)
        return total, steps, 1e3 * (time.perf_counter() - started), num_samples


def _set_apart_communication(total: Durations, steps: list[Durations], alone_ms: list[float]) -> None:
    """Moves from backward to communication what backward takes longer than alone, in the sum and in every step."""
    share = max(0.0, 1 - median(alone_ms) / median(step[BACKWARD] for step in steps))
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
