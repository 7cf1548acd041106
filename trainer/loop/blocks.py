"""The blocks of a model one by one: computed anew in the backward, which saves memory, or compiled, which saves time.

Neither changes a name in a state dict, nor what a run saves.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.common.errors import BadInput
from trainer.config import FlagGroup, flag
from trainer.parallel.buffers import kept_buffers
from trainer.task import Objective, Task

BACKEND = "inductor"
"""What `--compile` compiles with."""
_MOST_VERSIONS = 64
"""Of one function that torch compiles, before it runs as it is: blocks of different kinds are the same one to it."""


@dataclass
class BlockFlags(FlagGroup):
    """Speed and memory"""

    compile: bool = flag(
        False, "compile the model by torch.compile, each of its blocks by itself: quicker steps on GPUs, after a start "
        "of up to minutes",
    )  # fmt: skip
    grad_checkpointing: bool = flag(
        False, "keep of each block of the model its inputs alone, and compute the rest anew in the backward: less "
        "memory, longer steps, the same result to the bit",
    )  # fmt: skip


def prepare_blocks(flags: BlockFlags, task: Task, objective: Objective) -> None:
    """Does what the flags say with a model that is about to be trained. Raises BadInput."""
    blocks = task.blocks(objective.model)
    if flags.grad_checkpointing:
        if not blocks:
            raise BadInput(
                f"--grad-checkpointing: {type(task).__name__} names no blocks for this model; leave it out, or say by "
                "Task.blocks which parts of the model may be computed twice"
            )
        recompute(blocks)
    if flags.compile:
        compile_units(blocks or [objective])


# --- computed anew -----------------------------------------------------------------------------------------------


def recompute(blocks: Sequence[nn.Module]) -> None:
    """From now on their forwards keep no activations for the backward, which computes them anew.

    With the same random numbers, and without a trace in buffers.
    """
    for block in blocks:
        kind = type(block)
        block.__class__ = type(kind.__name__, (_Recomputed, kind), {"__module__": kind.__module__})


class _Recomputed(nn.Module):
    """The first base of a recomputed block's class.

    Hooks and what is compiled are within what is computed twice. A class and not a new `forward` of the block, which a
    replica of it would not be the self of.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        contexts = partial(_contexts, self)
        return checkpoint(super().__call__, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward, and around each of the others."""
    return nullcontext(), _KeptBuffers(block)


class _KeptBuffers(AbstractContextManager[None]):
    """`kept_buffers` for more than once: gradients of gradients compute a block anew for every backward."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __enter__(self) -> None:
        self._kept = kept_buffers(self._block)
        self._kept.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._kept.__exit__(*raised)


# --- compiled ----------------------------------------------------------------------------------------------------


def compile_units(units: Sequence[nn.Module]) -> None:
    """Compiles modules in place, at their next calls, for any sizes of their inputs.

    Sizes are unknowns from the start. What is compiled then depends on the first call alone, which is the same one
    whenever a run starts, and not on which sizes came before: a resumed run computes what the unbroken one does.
    """
    import torch._dynamo  # which takes seconds

    torch._dynamo.config.recompile_limit = max(_MOST_VERSIONS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.specialize_float = True  # a model's numbers are not sizes
    for unit in units:
        for module in unit.modules():
            if getattr(module, "stays_eager", False):
                kind = type(module)
                own = {"__module__": kind.__module__, "forward": torch.compiler.disable(kind.forward)}
                module.__class__ = type(kind.__name__, (kind,), own)
        unit.compile(backend=BACKEND, dynamic=True)


@contextmanager
def refusing_compilation() -> Iterator[None]:
    """Around the first calls of compiled modules: makes a BadInput of what the compiler raises."""
    import torch._dynamo

    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise BadInput(f"--compile: torch cannot compile the model: {lines[0]}; leave it out") from error
