"""What of a task's contract can be checked before training: one sentence with the method's name, not a traceback."""

import numpy as np
import torch
from torch import Tensor, nn

from trainer.loading.batches import Batch
from trainer.loading.errors import BadInput
from trainer.loading.order import split_global_batch
from trainer.loop.orders import ShuffledOrder
from trainer.loop.run import Run
from trainer.parallel.base import Parallel
from trainer.parallel.buffers import kept_buffers
from trainer.task import Task


def check_phases(task: Task) -> None:
    """Raises BadInput for phases that cannot be trained."""
    name, phases, turns = type(task).__name__, task.phases, task.turns
    if not phases or len(set(phases)) < len(phases):
        raise BadInput(f"{name}.phases {phases}: must be names, at least one and no two alike")
    if turns and (len(turns) != len(phases) or min(turns) < 1):
        raise BadInput(f"{name}.turns {turns}: must be empty, or a number of steps, 1 or more, for each of {phases}")


def try_phase(run: Run, phase: str, example: Batch) -> None:
    """A forward and a backward of a phase that change nothing. Raises BadInput unless they are what training needs.

    example: a batch whose samples do not count. DistributedDataParallel regroups its buckets after its first backward,
    which changes the order of summation: without this one the first step of a resumed run would differ from the same
    step unbroken.
    """
    outputs = _forward(run, run.learner.enter(phase), phase, run.parallel.to_device(example))
    problem = _problem(outputs)
    if problem is not None:
        name = f"{type(run.learner.objective).__name__}.forward"
        raise BadInput(f"{name}(batch, {phase!r}) in train mode {problem}; see Objective in trainer/task.py")
    (outputs["loss"] * 0).backward()
    run.learner.objective.zero_grad(set_to_none=True)


def check_single_samples(run: Run, phase: int, example: Batch) -> None:
    """Raises BadInput where a forward of training gets a single sample and a batch norm, now wrapped, refuses that.

    A batch norm over more than the samples, such as BatchNorm2d, takes it. All processes call it.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in run.learner.objective.modules()):
        return
    order, split = run.plan.orders[phase], run.batches[phase]
    sizes = {end - start for start, end in order.bounds(0, 0)}
    refused = sorted(size for size in sizes if leaves_a_single_sample(run.parallel, size, split.micro_batch_size))
    if not refused:
        return
    try:
        single = {name: tensor[:1].to(run.parallel.device) for name, tensor in example.items()}
        _forward(run, run.learner.net, run.task.phases[phase], single)
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        only_the_rest = isinstance(order, ShuffledOrder) and refused[-1] < order.global_batch_size
        step = "the last step" if only_the_rest else "a step"
        advice = (
            "leave that step out by --drop-last, or take another --batch-size" if only_the_rest else "take another one"
        )
        raise BadInput(
            f"--batch-size {split.batch_size}: {step} of an epoch, of {refused[-1]} sample(s), leaves one alone in a "
            f"forward, and a batch norm of the model takes at least two; {advice}"
        ) from None


def leaves_a_single_sample(parallel: Parallel, global_batch_size: int, micro_batch_size: int) -> bool:
    """Whether a device gets one sample alone in some forward of a global batch. The first and last rank show it."""
    world_size, samples = parallel.shard[1], np.arange(global_batch_size)
    shares = [split_global_batch(samples, (rank, world_size), micro_batch_size, 0) for rank in (0, world_size - 1)]
    parts = [torch.from_numpy(keys.index).chunk(parallel.num_replicas) for share in shares for keys in share]
    return any(len(part[-1]) == 1 for part in parts)


def _forward(run: Run, net: nn.Module, phase: str, batch: Batch) -> dict[str, Tensor]:
    """In train mode; buffers and random states stay as they were."""
    device = run.parallel.device
    net.train()
    with kept_buffers(run.learner.objective), torch.random.fork_rng([device] if device.type == "cuda" else []):
        return net(batch, phase)


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
