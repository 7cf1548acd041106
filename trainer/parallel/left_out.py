"""Keeps the collectives of a sharded run aligned if ranks skip different blocks or lack gradients.

PyTorch matches collectives across processes by their order. A process that skipped a collective would receive data of
other parameters.
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
    """Makes every process gather the blocks in the same order and reduce a gradient for every trained parameter.

    blocks: the sharded blocks, in execution order. If a forward pass skips blocks, the input of the next block first
    passes unchanged through the hooks of the skipped blocks, which run the same collectives as on other processes. A
    missing gradient is reduced as zeros, which `agree` removes if no process had a gradient.
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
        objective.register_forward_hook(self._end, prepend=True)  # PyTorch's hook then gets the new outputs
        for unit in objective.modules():
            group = group_of_unit(unit) if isinstance(unit, FSDPModule) else None
            if group is not None:  # units without parameters have no group
                group.pre_backward = partial(self._gather, group.pre_backward)
                group.post_backward = partial(self._reduce, group, group.post_backward)

    def forget(self) -> None:
        """Forgets which parameters had a gradient in previous backward passes."""
        self._used.clear()

    def agree(self, params: Sequence[Tensor], group: Group) -> None:
        """After a step's last backward pass, removes gradients of parameters that no process used.

        Processes tell each other which parameters they used; only a process that left one unused waits for the answers.

        params: parameters trained in the step.
        """
        own = [float(parameter in self._used) for parameter in params]
        self._numbers = group.start_sum(own)  # a gloo thread must not drop the last reference to the result
        if all(own):
            group.activity.enter(EXCHANGE)  # ranks that wait for the result enter it too
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
        if is_in_backward():  # activation checkpointing recomputes blocks in reverse order
            return _needing_gradient((args, kwargs)) if calls and calls.pop() else None
        if not self._in_forward:  # the model was called without the objective, and runs all of its blocks
            return None
        due = [*self._until(number), block]
        self._num_done += 1
        # usually a positional argument requires a gradient, which is quick to find
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
        """Yields the blocks that the forward pass has skipped before block `number`."""
        while self._num_done % len(self._blocks) != number:
            yield self._blocks[self._num_done % len(self._blocks)]
            self._num_done += 1

    # --- backward ----------------------------------------------------------------------------------------------------

    def _gather(self, pre_backward: Callable[..., None], *args: Any) -> None:
        if self._in_forward:
            raise UserError(
                "--multi-gpu fsdp: the objective computes a gradient within its forward pass (as a gradient penalty "
                "does) through blocks of Task.blocks, but fsdp has freed their gathered parameters by then; leave "
                "these blocks out of Task.blocks, or use --multi-gpu ddp"
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
    """Makes a block's input require a gradient, so that PyTorch reduces the block's gradients when they are complete.

    Otherwise it would reduce them at the end of the backward pass, with the root unit.
    """
    return _replaced(values, lambda value: value.detach().requires_grad_()) or values


def _passed_through(blocks: Sequence[Any], values: Any) -> Any:
    """Passes one floating-point tensor through the blocks' hooks. Raises UserError if `values` has no such tensor."""

    def passed(value: Tensor) -> Tensor:
        for block in blocks:
            value = pass_through(block, value)
        return value

    if not blocks:
        return values
    replaced = _replaced(values, passed)
    if replaced is None:
        raise UserError(
            f"--multi-gpu fsdp: a forward pass skipped a {type(blocks[0]).__name__} of Task.blocks, and the next block "
            "gets no floating-point tensor; leave both blocks out of Task.blocks, or use --multi-gpu ddp"
        )
    return replaced


def _replaced(values: Any, function: Callable[[Tensor], Tensor]) -> Any | None:
    """Applies a function to one floating-point tensor: the first that requires gradients, or else the first."""
    leaves, structure = tree_flatten(values)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not places:
        return None
    place = next((place for place in places if leaves[place].requires_grad), places[0])
    leaves[place] = function(leaves[place])
    return tree_unflatten(leaves, structure)
