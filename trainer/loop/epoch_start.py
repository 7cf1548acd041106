"""What a task computes from the whole model between two epochs."""

from hashlib import blake2b

import torch

from trainer.common.errors import UserError
from trainer.loop.run import Run
from trainer.parallel.parts import is_sharded
from trainer.task import Task


def start_epoch(run: Run) -> None:
    """Calls the task's `on_epoch_start` on every process. Raises UserError if what it leaves is not the same on all."""
    task, learner, device = run.task, run.learner, run.parallel.device
    method = type(task).on_epoch_start
    if method is Task.on_epoch_start:
        return
    run.parallel.activity.enter("the start of the epoch")
    with torch.no_grad(), run.parallel.unsharded(learner.objective), learner.precision.autocast(device.type):
        task.on_epoch_start(learner.objective, run.progress.position.epoch, run.log.progress)
    if run.parallel.world_size == 1:
        return
    digests = run.parallel.gather(_digest(learner.objective))
    if len(set(digests)) > 1:
        raise UserError(
            f"--task {run.facts['task']}: {method.__qualname__} left other weights or buffers on rank "
            f"{next(rank for rank, digest in enumerate(digests) if digest != digests[0])} than on rank 0; it must be a "
            "function of the model and the epoch"
        )


def _digest(objective: torch.nn.Module) -> bytes:
    digest = blake2b()
    for value in objective.state_dict().values():
        if is_sharded(value):  # each process has its own
            continue
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.digest()
