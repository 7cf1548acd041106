"""Activation checkpointing (`--grad-checkpointing`) and compilation (`--compile`) of a model's blocks.

Neither option changes state dict keys or checkpoints.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.common.errors import UserError
from trainer.common.torch_private import own_buffers, set_up_compiler
from trainer.flags import BlockFlags
from trainer.loop.module_state import (
    ABSENT,
    Change,
    Copies,
    References,
    State,
    WholeState,
    copied,
    named_modules,
    version_of,
)
from trainer.task import Objective, Task

BACKEND = "inductor"
_NO_GRADIENT_OF_GRADIENTS = ("donated buffer", "does not currently support double backward")
"""Fragments of PyTorch's error messages about second derivatives of compiled code."""
_MOST_VERSIONS = 64
"""Maximum number of compiled versions per function, over all blocks; beyond it PyTorch runs the function eagerly."""


def prepare_blocks(flags: BlockFlags, task: Task, objective: Objective) -> None:
    """Applies `--grad-checkpointing` and `--compile`. Raises UserError if a task names no blocks for checkpointing."""
    blocks = task.blocks(objective.model)
    if flags.grad_checkpointing:
        if not blocks:
            raise UserError(
                "--grad-checkpointing: `Task.blocks` names no modules of this model to recompute; leave the flag out, "
                "or call torch.utils.checkpoint in the model"
            )
        recompute(blocks)
    if flags.compile:
        compile_units(blocks or [objective])


# --- activation checkpointing -------------------------------------------------------------------------------------


def recompute(blocks: Sequence[nn.Module]) -> None:
    """Makes blocks recompute their activations in the backward pass instead of storing them.

    A recomputation uses the random numbers, buffers and attributes of the original forward pass, and leaves the
    block's current buffers and attributes unchanged.
    """
    for block in blocks:
        kind = type(block)
        own = {"__module__": kind.__module__, "changing": None}
        block.__class__ = type(kind.__name__, (_Recomputed, kind), own)


def settle_recomputed(objective: nn.Module, changes: Iterable[Change]) -> None:
    """Makes each recomputed block copy only the buffers and attributes that its forward changes.

    changes: buffers and attributes that trial forward passes changed. Raises UserError if a change cannot be undone.
    """
    changes = list(changes)
    for prefix, block in objective.named_modules():
        if not isinstance(block, _Recomputed):
            continue
        path_of = {id(module): path for path, module in block.named_modules()}
        own = [change for change in changes if id(change.module) in path_of]
        for change in own:
            if not change.is_seen:
                raise _not_alike(change.path, "which cannot be restored")
        type(block).path = prefix
        type(block).changing = {(path_of[id(change.module)], change.name) for change in own}


def _not_alike(what: str, why: str) -> UserError:
    return UserError(
        f"--grad-checkpointing: forward passes change {what}, {why}, so the backward pass cannot recompute the block; "
        "leave out the flag, or remove the block from Task.blocks"
    )


class _Recomputed(nn.Module):
    """Mixin that wraps calls of a block in `checkpoint`; `recompute` derives a class from it for each block.

    The mixin overrides `__call__`, so that recomputation includes hooks and compiled code. A `forward` assigned to a
    block's instance would fail in DataParallel, whose replicas would call the original block's `forward`.
    """

    path: ClassVar[str] = ""
    """The block's name in the objective's `named_modules()`."""
    changing: ClassVar[set[tuple[str, str]] | None]
    """(submodule path, name) of each buffer and attribute that the forward changes; None before the trial."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        contexts = partial(_contexts, self)
        return checkpoint(super().__call__, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(block: _Recomputed) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    changing = type(block).changing
    return nullcontext(), _AsFound(block) if changing is None else _PartlyAsFound(block, changing)


class _AsFound(AbstractContextManager[None]):
    """Context in which a block works on copies of the buffers and attributes that it had when the context was created.

    The copies leave the original tensors intact for the backward pass. The context can be entered several times,
    because with second derivatives each backward pass recomputes the block.
    """

    def __init__(self, block: _Recomputed) -> None:
        self._block = block
        self._found: State = WholeState(block)

    def __enter__(self) -> None:
        self._work_on_copies(WholeState(self._block))

    def _work_on_copies(self, now: References) -> None:
        self._now, copies = now, Copies()
        self._found.write(instead=lambda value: copied(self._found.copy_of(value), copies))

    def __exit__(self, *raised: Any) -> None:
        self._now.write()


class _PartlyAsFound(_AsFound):
    """Context that copies only what the trial's forwards changed. changing: as in `_Recomputed`.

    Restores other entries if a forward replaces them. Raises UserError if a forward writes to another tensor.
    """

    def __init__(self, block: _Recomputed, changing: Iterable[tuple[str, str]]) -> None:
        self._block, modules = block, dict(named_modules(block))
        entries = [(modules[path], name) for path, name in changing]
        self._found = State((m._buffers if name in m._buffers else m.__dict__, name) for m, name in entries)
        self._held = [(own, own.copy()) for each in modules.values() for own in (vars(each), each._buffers) if own]
        tensors = [value for _, held in self._held for value in held.values() if type(value) is Tensor]
        self._versions = [(value, version_of(value)) for value in tensors if id(value) not in self._found.copies]

    def __enter__(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise _not_alike(self._first_changed(), "which the first forward pass did not change")
        self._found.entries += [
            (owner, name, held.get(name, ABSENT))
            for owner, held in self._held
            if len(owner) != len(held) or not all(map(is_, owner.values(), held.values()))  # fast, as few differ
            for name in owner.keys() | held.keys()
            if owner.get(name, ABSENT) is not held.get(name, ABSENT)
        ]
        self._work_on_copies(References((owner, name) for owner, name, _ in self._found.entries))

    def _first_changed(self) -> str:
        changed = {id(tensor) for tensor, version in self._versions if version_of(tensor) != version}
        names = (
            f"{path}.{name}"
            for path, module in self._block.named_modules(prefix=type(self._block).path)
            for held in (own_buffers(module), vars(module))
            for name, value in held.items()
            if id(value) in changed
        )
        return next(names, "a tensor")


# --- compilation -------------------------------------------------------------------------------------------------


def compile_units(units: Sequence[nn.Module]) -> None:
    """Marks modules for compilation at their next call, with dynamic shapes.

    With dynamic shapes, the compiled code depends only on the first call, not on later shapes. A resumed run makes the
    same first call as an uninterrupted run, and therefore computes the same results.
    """
    set_up_compiler(_MOST_VERSIONS)
    for unit in units:
        for module in unit.modules():
            if getattr(module, "stays_eager", False):
                kind = type(module)
                own = {"__module__": kind.__module__, "forward": torch.compiler.disable(kind.forward)}
                module.__class__ = type(kind.__name__, (kind,), own)
        unit.compile(backend=BACKEND, dynamic=True)


@contextmanager
def refusing_compilation() -> Iterator[None]:
    """Context that raises UserError for compilation errors and for second derivatives of compiled code."""
    compiler_error = set_up_compiler(_MOST_VERSIONS)
    try:
        yield
    except compiler_error as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(f"--compile: torch cannot compile the model: {lines[0]}; leave the flag out") from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_GRADIENT_OF_GRADIENTS):
            raise
        raise UserError(
            "--compile: the objective computes a gradient within its forward pass (as a gradient penalty does), but "
            "torch.compile does not support second derivatives; leave the flag out"
        ) from error
