"""What a run is, in words for its user and in facts for its checkpoints."""

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.records import as_json
from trainer.checkpoint.schema import brief
from trainer.commands.flags import Flags
from trainer.common.errors import UserError
from trainer.common.files import MOST_RECORD, plain
from trainer.loop.run import Run
from trainer.parallel.base import Parallel
from trainer.task import Task


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
    parallel, batches = run.parallel, run.memory.splits[0]
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
        *run.learner.buffers.forward_state.remarks(world_size),
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
    for phase, split in zip(run.task.phases, run.memory.splits, strict=True):
        exact = split.batch_size * num_devices * split.grad_accum_steps == split.global_batch_size
        lines.append(
            f"Batch{f' of phase {phase}' if len(run.memory.splits) > 1 else ''}: {split.global_batch_size} samples per "
            f"optimizer step, from {split.batch_size} per device per forward (--batch-size is per device) x "
            f"{num_devices} device(s) x {split.grad_accum_steps} accumulation step(s)"
            + ("" if exact else ", the last ones smaller")
        )
    return lines


def facts_of_data(task: Task) -> dict[str, Any]:
    """Facts of `describe_data`, in values that a checkpoint and config.json can hold. Raises UserError."""
    told: Any = task.describe_data()
    try:
        if not isinstance(told, Mapping) or not all(isinstance(name, str) for name in told):
            raise ValueError(f"returned {brief(told)}: must be a mapping of facts by names")
        facts = {str(name): plain(value, name) for name, value in told.items()}
        num_bytes = len(as_json(facts))
        if num_bytes > MOST_RECORD // 2:
            raise ValueError(f"returned {num_bytes:,} bytes: must be at most {MOST_RECORD // 2:,}")
    except (ValueError, RecursionError) as error:
        problem = "returned lists in lists, nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{type(task).__name__}.describe_data: {problem}") from None
    return facts


def digest_of_data(task: Task) -> str | None:
    """The task's `data_digest`, as text. Raises UserError."""
    digest: Any = task.data_digest()
    if isinstance(digest, bytes | bytearray):
        return digest.hex()
    if digest is not None and not isinstance(digest, str | int):
        raise UserError(f"{type(task).__name__}.data_digest: returned {brief(digest)}: must be a text, or None")
    return None if digest is None else f"{digest}"
