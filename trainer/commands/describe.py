"""What a run is, in words for its user and in facts for its checkpoints."""

import platform
from typing import Any

import numpy as np
import torch

from trainer.commands.flags import Flags
from trainer.loop.run import Run
from trainer.parallel.base import Parallel


def describe_environment(parallel: Parallel) -> dict[str, Any]:
    """All that identity to the bit depends on, besides the flags."""
    return {
        "world_size": parallel.world_size,
        "num_devices": parallel.num_devices,
        "num_threads_per_rank": torch.get_num_threads(),
        "device_type": parallel.device.type,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def describe_run(run: Run, flags: Flags) -> list[str]:
    """The lines at the start of every run."""
    parallel, batches = run.parallel, run.batches[0]
    world_size, num_devices = parallel.world_size, parallel.num_devices
    lines = [
        f"Devices: {parallel.describe()}",
        *describe_batches(run),
        f"Workers: {flags.run.num_workers} per rank, {flags.run.num_workers * world_size} in all"
        f"{', and as many for evaluation' if flags.run.num_workers else ''}. "
        f"Threads: {torch.get_num_threads()} per rank. Precision: {run.learner.precision}.",
        f"Data: {', '.join(f'{len(d)} {name}' for name, d in run.task.splits().items())} samples. "
        f"Model: {run.learner.num_parameters} parameters.",
        *run.task.remarks(),
        *run.lockstep.remarks(),
    ]
    scaled = run.learning_rate.peak
    if scaled != flags.learning.lr:
        one_device = flags.batch.batch_size * flags.batch.grad_accum_steps
        why = f"{num_devices} devices"
        if batches.global_batch_size != one_device * num_devices:
            why = f"a global batch of {batches.global_batch_size} samples instead of {one_device}"
        lines.append(f"Scaling learning rate from {flags.learning.lr:g} to {scaled:g} for {why}")
    return lines


def describe_batches(run: Run) -> list[str]:
    """A line for each phase about how its batches are cut."""
    lines, num_devices = [], run.parallel.num_devices
    for phase, split in zip(run.task.phases, run.batches, strict=True):
        exact = split.batch_size * num_devices * split.grad_accum_steps == split.global_batch_size
        lines.append(
            f"Batch{f' of phase {phase}' if len(run.batches) > 1 else ''}: {split.global_batch_size} samples per "
            f"optimizer step, from {split.batch_size} per device per forward (--batch-size is per device) x "
            f"{num_devices} device(s) x {split.grad_accum_steps} accumulation step(s)"
            + ("" if exact else ", the last ones smaller")
        )
    return lines
