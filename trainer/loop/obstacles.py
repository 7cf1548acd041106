"""Explains why a step cannot be captured as CUDA graphs: before the first step, or after a failed capture."""

import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.common.errors import reason
from trainer.common.torch_private import has_hooks, hooked_module
from trainer.loop.buffers import Buffers
from trainer.loop.memory import lacks_memory
from trainer.loop.optimizers import CAPTURABLE, can_be_captured
from trainer.loop.precision import Precision
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, sparse_parameters

CHANGES = "forward passes change {}, but replays of a graph would not"
DRAWS = "forward passes draw from the host's random generators"
SPARSE = "gradients of sparse embeddings change size in every step"


def obstacle_to_forwards(objective: Objective, strategy: Strategy) -> str | None:
    """Returns why forward passes cannot be captured, in training or evaluation, or None."""
    if strategy.exchanges_in_forward or strategy.num_replicas > 1:
        return "a forward pass spans several devices"
    hooked = hooked_module(objective)
    names = [hooked] if hooked is not None else []
    names += [name for name, parameter in objective.named_parameters() if has_hooks(parameter)]
    return f"hooks of {names[0] or 'the objective'} would not be called" if names else None


def obstacle_to_passes(objective: Objective, strategy: Strategy, precision: Precision, buffers: Buffers) -> str | None:
    """Returns why forward and backward passes cannot be captured, or None."""
    if (obstacle := obstacle_to_forwards(objective, strategy)) is not None:
        return obstacle
    if any(isinstance(module, nn.SyncBatchNorm) for module in objective.modules()):
        return "--sync-bn exchanges statistics in the forward pass"
    if strategy.overlaps:
        return "gradients of a model this large are exchanged during the backward pass"
    if precision.dtype == torch.float64:
        return "fused optimizers cannot read a float64 learning rate from memory"
    if strategy.draws_on_host:
        return DRAWS
    if sparse_parameters(objective):
        return SPARSE
    changes = buffers.forward_state.changes.values()
    changed = [change.path for change in changes if not (change.is_buffer and change.in_place)]
    return CHANGES.format(changed[0]) if changed else None


def obstacle_to_update(objective: Objective, optimizers: Sequence[Optimizer], buffers: Buffers) -> str | None:
    """Returns why an update cannot be captured, or None. Forward and backward passes may still be captured."""
    if type(objective).after_step is not Objective.after_step:
        return f"{type(objective).__name__} has its own after_step"
    for optimizer in optimizers:
        if not can_be_captured(optimizer):
            return f"{type(optimizer).__name__} is not a fused {' or '.join(CAPTURABLE)} without hooks"
    if buffers.forward_state.is_active:
        return "forward passes change buffers, which each step copies to new memory"
    return None


class CannotBeCaptured(RuntimeError):
    """Raised if a function cannot be captured; the message is the reason."""


def explain(error: Exception) -> str:
    """Returns the reason for a failed capture, with the user's line of code."""
    if isinstance(error, CannotBeCaptured):
        return str(error)
    if isinstance(error, RuntimeError) and lacks_memory(error):
        return "no memory for a graph"
    frames, library = traceback.extract_tb(error.__traceback__), Path(torch.__file__).parent
    skipped = "__torch_dispatch__"  # which rehearsals run within the user's line
    own = [each for each in frames if not Path(each.filename).is_relative_to(library) and each.name != skipped]
    return f"{reason(error)} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
