"""Blocks and gradients that a rank of a sharded run leaves out of a step, and its part in their exchanges.

Gathers and reductions have no names: torch pairs the first one of a process with the first one of every other, and so
on. A process that skips a block, or has no gradient of a parameter, would get what belongs to other parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.common.errors import UserError
from trainer.common.torch_private import (
    group_of_unit,
    is_in_backward,
    pass_through,
    tree_flatten,
    tree_unflatten,
    unsharded,
)
from trainer.failure.heartbeat import EXCHANGE
from trainer.parallel.group import Group
from trainer.task import Objective


class LeftOut:
    """Every process gathers the blocks of a model in one order, and reduces a gradient of every trained parameter.

    blocks: in the order in which they run. Where a forward comes to a block before its turn, the block's input passes
    through those that were left out: to torch they ran, as the identity, and used none of their parameters. So they are
    gathered, freed and reduced where other processes run them. A parameter that a backward leaves without a gradient is
    reduced as zeros, and `agree` removes them if no process had a gradient.
    """

    def __init__(self, objective: Objective, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._num_done = 0
        self._in_forward = False
        self._made_to_need_gradient: list[list[bool]] = [[] for _ in blocks]
        self._used: set[Tensor] = set()
        self._numbers: Callable[[], Sequence[float]] = tuple
        for number, block in enumerate(blocks):
            catch_up = torch.compiler.disable(partial(self._catch_up, number))
            block.register_forward_pre_hook(catch_up, prepend=True, with_kwargs=True)
        objective.register_forward_pre_hook(self._begin, prepend=True)
        objective.register_forward_hook(self._end, prepend=True)  # torch's own then sees what it returns
        for unit in objective.modules():
            group = group_of_unit(unit) if isinstance(unit, FSDPModule) else None
            if group is not None:  # as that of a unit without parameters
                group.pre_backward = partial(self._gather, group.pre_backward)
                group.post_backward = partial(self._reduce, group, group.post_backward)

    def forget(self) -> None:
        """After a backward that is no part of a step."""
        self._used.clear()

    def agree(self, params: Sequence[Tensor], group: Group) -> None:
        """After the last backward of a step: a parameter has a gradient where any process had one.

        Every process says which ones it has, and only one that lacks a gradient waits for the others to say so.

        params: trained in the step.
        """
        own = [float(parameter in self._used) for parameter in params]
        self._numbers = group.start_sum(own)  # kept until the next one: no thread of gloo is the last to hold it
        if all(own):
            group.activity.enter(EXCHANGE)  # as on a process that waits: all enter the same activities
        else:
            for parameter, number in zip(params, self._numbers(), strict=True):
                if not number:
                    parameter.grad = None
        self.forget()

    # --- forward -----------------------------------------------------------------------------------------------------

    def _begin(self, *_: object) -> None:
        self._in_forward, self._num_done = True, 0
        for calls in self._made_to_need_gradient:
            calls.clear()

    def _catch_up(self, number: int, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        calls = self._made_to_need_gradient[number]
        if is_in_backward():  # a backward computes the block again, that of the last call first
            return _needing_gradient((args, kwargs)) if calls and calls.pop() else None
        if not self._in_forward:  # what calls the model alone has all blocks
            return None
        due = [*self._until(number), block]
        self._num_done += 1
        # Of its positional inputs the usual one is seen quickly.
        has_gradient = any(map(_needs_gradient, args)) or any(map(_needs_gradient, tree_flatten((args, kwargs))[0]))
        needs = not has_gradient and torch.is_grad_enabled() and any(map(_is_trained, due))
        calls.append(needs)
        if not needs and len(due) == 1:
            return None
        return _passed_through(due[:-1], _needing_gradient((args, kwargs)) if needs else (args, kwargs))

    def _end(self, objective: nn.Module, args: Any, outputs: Any) -> Any:
        self._in_forward = False
        due = list(self._until(0)) if self._num_done else self._blocks
        if not due:
            return None
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        passed = _passed_through(due, torch.zeros(()) if loss is None else loss)
        return None if loss is None else outputs | {"loss": passed}

    def _until(self, number: int) -> Iterator[nn.Module]:
        """The blocks from the one whose turn it is to the one before this number."""
        while self._num_done % len(self._blocks) != number:
            yield self._blocks[self._num_done % len(self._blocks)]
            self._num_done += 1

    # --- backward ----------------------------------------------------------------------------------------------------

    def _gather(self, pre_backward: Callable[..., None], *args: Any) -> None:
        if self._in_forward:
            raise UserError(
                "--multi-gpu fsdp: the objective computes a gradient within its forward, as for a gradient penalty, "
                "through blocks of Task.blocks, which are freed and cannot be differentiated again; let Task.blocks "
                "return none of them, or take --multi-gpu ddp"
            )
        pre_backward(*args)

    def _reduce(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        for parameter in group.fsdp_params:
            whole = unsharded(parameter)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            else:
                self._used.add(parameter.sharded_param)
        post_backward(*args)


def _is_trained(block: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in block.parameters())


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _needing_gradient(values: Any) -> Any:
    """The values, one of which now needs a gradient: torch reduces a block as the backward comes to its input.

    One whose input needs none it reduces at the end, with what is around blocks.
    """
    return _replaced(values, lambda value: value.detach().requires_grad_()) or values


def _passed_through(blocks: Sequence[Any], values: Any) -> Any:
    """The values, one of which has gone through the blocks. Raises UserError where none can have a gradient."""

    def passed(value: Tensor) -> Tensor:
        for block in blocks:
            value = pass_through(block, value)
        return value

    if not blocks:
        return values
    replaced = _replaced(values, passed)
    if replaced is None:
        raise UserError(
            f"--multi-gpu fsdp: a {type(blocks[0]).__name__} of Task.blocks does not run, and what runs after it "
            "gets no floating-point numbers; let Task.blocks name neither of them, or take --multi-gpu ddp"
        )
    return replaced


def _replaced(values: Any, function: Callable[[Tensor], Tensor]) -> Any | None:
    """The values with another one in the place of the first tensor that needs a gradient, or else could have one."""
    leaves, structure = tree_flatten(values)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not places:
        return None
    place = next((place for place in places if leaves[place].requires_grad), places[0])
    leaves[place] = function(leaves[place])
    return tree_unflatten(leaves, structure)
