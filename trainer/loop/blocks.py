"""The blocks of a model one by one: computed again in the backward, which saves memory, or compiled, which saves time.

Neither changes a name in a state dict, nor what a run saves.
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
"""What `--compile` compiles with."""
_NO_GRADIENT_OF_GRADIENTS = ("donated buffer", "does not currently support double backward")
"""Words of torch's error in the second backward of compiled code."""
_MOST_VERSIONS = 64
"""Versions of one function that torch compiles before it runs it as it is; to torch all blocks are one function."""


def prepare_blocks(flags: BlockFlags, task: Task, objective: Objective) -> None:
    """Does what the flags say with a model that is about to be trained. Raises UserError."""
    blocks = task.blocks(objective.model)
    if flags.grad_checkpointing:
        if not blocks:
            raise UserError(
                f"--grad-checkpointing: {type(task).__name__} names no blocks for this model; leave it out, or say by "
                "Task.blocks which parts of the model may be computed twice"
            )
        recompute(blocks)
    if flags.compile:
        compile_units(blocks or [objective])


# --- computed again ----------------------------------------------------------------------------------------------


def recompute(blocks: Sequence[nn.Module]) -> None:
    """From now on their forwards keep no activations for the backward, which computes them again.

    With the same random numbers, and from the buffers and attributes that the first forward found. These then hold
    again what they held before the second one.
    """
    for block in blocks:
        kind = type(block)
        own = {"__module__": kind.__module__, "changing": None}
        block.__class__ = type(kind.__name__, (_Recomputed, kind), own)


def settle_recomputed(objective: nn.Module, changes: Iterable[Change]) -> None:
    """Before training: tells recomputed blocks what forwards change, of which alone each then keeps copies.

    changes: in the whole objective, as forwards that tried it have shown. Raises UserError for what cannot be put back.
    """
    changes = list(changes)
    for prefix, block in objective.named_modules():
        if not isinstance(block, _Recomputed):
            continue
        path_of = {id(module): path for path, module in block.named_modules()}
        own = [change for change in changes if id(change.module) in path_of]
        for change in own:
            if not change.is_seen:
                raise _not_alike(change.path, "which cannot be put back")
        type(block).path = prefix
        type(block).changing = {(path_of[id(change.module)], change.name) for change in own}


def _not_alike(what: str, why: str) -> UserError:
    return UserError(
        f"--grad-checkpointing: forwards change {what}, {why}, so that the backward cannot compute a block a second "
        "time as it was the first time; leave the flag out, or leave that block out of Task.blocks"
    )


class _Recomputed(nn.Module):
    """The first base of a recomputed block's class.

    Hooks and what is compiled are within what is computed twice. A class and not a new `forward` of the block, which a
    replica of it would not be the self of. The class belongs to one block, and its replicas.
    """

    path: ClassVar[str] = ""
    """Path of the block in the objective."""
    changing: ClassVar[set[tuple[str, str]] | None]
    """Entries that forwards change, by the path of a submodule and the name in it; None before they are known."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        contexts = partial(_contexts, self)
        return checkpoint(super().__call__, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(block: _Recomputed) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward, and around each of the others."""
    return nullcontext(), _AsFound(block)


class _AsFound(AbstractContextManager[None]):
    """Within it a block holds what it held when this was made; afterwards it holds what it does now.

    It works on copies, which the backward may then go on reading. Any number of times: gradients of gradients compute
    a block again for every backward.
    """

    def __init__(self, block: _Recomputed) -> None:
        self._block, changing = block, type(block).changing
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The attributes and the buffers of each module, with shallow copies."""
        if changing is None:
            self._found: State = WholeState(block)
        else:
            modules = dict(block.named_modules()) if changing else {}
            entries = [(modules[path], name) for path, name in changing]
            self._found = State((m._buffers if name in m._buffers else m.__dict__, name) for m, name in entries)
            # What else a forward replaces is not lost, and what else it writes into shows.
            owners = [owner for _, each in named_modules(block) for owner in (vars(each), each._buffers) if owner]
            self._held = [(owner, owner.copy()) for owner in owners]
        self._versions = [
            (value, version_of(value))
            for _, held in self._held
            for value in held.values()
            if type(value) is Tensor and id(value) not in self._found.copies
        ]

    def __enter__(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise _not_alike(self._first_changed(), "which the first forward of all did not change")
        replaced = [
            (owner, name, held.get(name, ABSENT))
            for owner, held in self._held
            if len(owner) != len(held) or not all(map(is_, owner.values(), held.values()))
            for name in owner.keys() | held.keys()
            if owner.get(name, ABSENT) is not held.get(name, ABSENT)
        ]
        self._found.entries += replaced
        is_whole = type(self._block).changing is None
        of_now = References((owner, name) for owner, name, _ in self._found.entries)
        self._now = WholeState(self._block) if is_whole else of_now
        copies: Copies = {}
        self._found.write(instead=lambda value: copied(self._found.copy_of(value), copies))

    def __exit__(self, *raised: Any) -> None:
        self._now.write()

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


# --- compiled ----------------------------------------------------------------------------------------------------


def compile_units(units: Sequence[nn.Module]) -> None:
    """Compiles modules in place, at their next calls, for any sizes of their inputs.

    Sizes are unknowns from the start. What is compiled then depends on the first call alone, which is the same one
    whenever a run starts, and not on which sizes came before: a resumed run computes what the unbroken one does.
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
    """Around the first calls of compiled modules: makes a UserError of what the compiler raises."""
    compiler_error = set_up_compiler(_MOST_VERSIONS)
    try:
        yield
    except compiler_error as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(f"--compile: torch cannot compile the model: {lines[0]}; leave it out") from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_GRADIENT_OF_GRADIENTS):
            raise
        raise UserError(
            "--compile: the objective computes a gradient within its forward, as for a gradient penalty, and torch "
            "cannot differentiate what it has compiled a second time; leave it out"
        ) from error
