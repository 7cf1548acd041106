"""What of a task's contract can be checked before training: one sentence with the method's name, not a traceback."""

import torch
from torch import Tensor

from trainer.loading.batches import Batch
from trainer.loading.errors import BadInput
from trainer.loop.run import Run
from trainer.parallel.buffers import kept_buffers
from trainer.task import Objective, Task


def check_phases(task: Task) -> None:
    """Raises BadInput for phases that cannot be trained."""
    name, phases, turns = type(task).__name__, task.phases, task.turns
    if not phases or len(set(phases)) < len(phases):
        raise BadInput(f"{name}.phases {phases}: must be names, at least one and no two alike")
    if turns and (len(turns) != len(phases) or min(turns) < 1):
        raise BadInput(f"{name}.turns {turns}: must be empty, or a number of steps, 1 or more, for each of {phases}")


def check_forward(run: Run, phase: str, example: Batch) -> None:
    """Raises BadInput unless a forward in train mode returns what training needs. Nothing is left of it."""
    objective, device = run.learner.objective, run.parallel.device
    batch = {name: tensor.to(device) for name, tensor in example.items()}
    objective.train()
    gpus = [device] if device.type == "cuda" else []
    with kept_buffers(objective), torch.random.fork_rng(gpus):
        sums = run.learner.net(batch, phase)
    problem = _problem(sums)
    if problem is not None:
        name = f"{type(objective).__name__}.forward"
        raise BadInput(f"{name}(batch, {phase!r}) in train mode {problem}; see {Objective.__name__} in trainer/task.py")


def _problem(sums: object) -> str | None:
    if not isinstance(sums, dict) or not all(isinstance(value, Tensor) for value in sums.values()):
        return "must return a dict of tensors, sums all of them"
    if "loss" not in sums:
        return f"returns {', '.join(sums) or 'nothing'} and no 'loss'"
    if sums["loss"].dim() > 0:
        return f"returns a loss of shape {tuple(sums['loss'].shape)}: it must be one number, the sum over the samples"
    if not sums["loss"].requires_grad:
        return "returns a loss that depends on none of the parameters of `param_groups`"
    if "weight" in sums:
        return "returns 'weight', which is the trainer's own name for the number of loss terms"
    return None
