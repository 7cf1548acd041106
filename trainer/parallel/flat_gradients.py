"""Sums gradients over processes after the backward pass: dense ones in flat buffers, sparse ones singly."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.common.torch_private import foreach_copy_

NOTHING = -0.0
"""Value of a missing gradient in a sum. Adding -0.0 changes no other number; adding 0.0 would turn -0.0 into 0.0."""


class FlatGradients:
    """Gradients of parameters in flat buffers, one buffer per dtype.

    Each buffer is followed by one count per gradient: how many processes have it. Only a process that lacks a gradient
    reads the counts, and therefore waits for its device.

    params: the same parameters in the same order on all processes. flat: the one-dimensional buffers.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in params:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        self._buffers = [_Buffer(same) for same in by_type.values()]
        self.flat = [buffer.flat for buffer in self._buffers]
        view_of = {id(p): view for each in self._buffers for p, view in zip(each.params, each.views, strict=True)}
        self.views = [view_of[id(parameter)] for parameter in params]

    @property
    def present(self) -> tuple[bool, ...]:
        """Returns, for each parameter, whether it has a gradient."""
        return tuple(parameter.grad is not None for parameter in self._params)

    @torch.no_grad()
    def collect(self) -> None:
        """Copies each gradient into its buffer, unless it is already there, and sets `grad` to a view of the buffer."""
        copied = [
            (parameter, view)
            for parameter, view in zip(self._params, self.views, strict=True)
            if parameter.grad is not None and parameter.grad is not view
        ]
        if copied:
            foreach_copy_([view for _, view in copied], [parameter.grad for parameter, _ in copied])
        for parameter, view in copied:
            parameter.grad = view

    def attach(self, present: Sequence[bool]) -> None:
        """Sets each `grad` to a view of its buffer, or to None. present: whether each parameter has a gradient."""
        for parameter, view, is_present in zip(self._params, self.views, present, strict=True):
            parameter.grad = view if is_present else None

    @torch.no_grad()
    def copy_out(self) -> None:
        """Replaces each `grad` with a copy outside the buffers."""
        there = [(parameter, parameter.grad) for parameter in self._params if parameter.grad is not None]
        if there:
            copies = [torch.empty_like(grad) for _, grad in there]
            foreach_copy_(copies, [grad for _, grad in there])
            for (parameter, _), copy in zip(there, copies, strict=True):
                parameter.grad = copy

    def sum(self, sum_in_place: Callable[[Tensor], None]) -> None:
        """Sums each `grad` over processes; a `grad` stays None if no process has a gradient.

        sum_in_place: sums a real-valued tensor over processes. All processes must call this method.
        """
        self.collect()
        for buffer in self._buffers:
            buffer.sum(sum_in_place)


@torch.no_grad()
def sum_sparse(parameter: Tensor, sum_in_place: Callable[[Tensor], None], divisor: int) -> None:
    """Sums a sparse gradient over processes and divides the sum by `divisor`. All processes must call this function.

    The sum contains the rows of all processes; if it has no rows, `grad` becomes None. parameter: of shape (rows, ...).
    sum_in_place: sums a sparse tensor over processes.
    """
    if parameter.grad is None:
        no_rows = parameter.new_empty((1, 0), dtype=torch.int64), parameter.new_empty((0, *parameter.shape[1:]))
        total = torch.sparse_coo_tensor(*no_rows, parameter.shape, check_invariants=False)
    else:
        total = parameter.grad.coalesce()
    sum_in_place(total)
    total = total.coalesce().div_(divisor)
    parameter.grad = total if len(total.values()) else None


class _Buffer:
    """Flat buffer of the gradients of one dtype, followed by their counts."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        num_elements = sum(parameter.numel() for parameter in params)
        self._all = torch.zeros(num_elements + len(params), dtype=params[0].dtype, device=params[0].device)
        self.flat, self._counts = self._all[:num_elements], self._all[num_elements:]
        self._all_ones = torch.ones_like(self._counts)
        views = self.flat.split([parameter.numel() for parameter in params])
        self.views = [_laid_out_as(view, parameter) for view, parameter in zip(views, params, strict=True)]

    @torch.no_grad()
    def sum(self, sum_in_place: Callable[[Tensor], None]) -> None:
        lacking = [number for number, parameter in enumerate(self.params) if parameter.grad is None]
        self._counts.copy_(self._all_ones)
        for number in lacking:
            view = self.views[number]
            (torch.view_as_real(view) if view.is_complex() else view).fill_(NOTHING)
            self._counts[number] = 0
        sum_in_place(torch.view_as_real(self._all) if self._all.is_complex() else self._all)
        counts = self._counts.tolist() if lacking else ()
        for number in lacking:
            self.params[number].grad = self.views[number] if counts[number] else None


def _laid_out_as(flat: Tensor, parameter: Tensor) -> Tensor:
    """Returns a view of a flat tensor with the parameter's shape, and with its strides if they leave no gaps.

    Fused optimizers traverse a parameter and its gradient in memory order, so their strides must agree.
    """
    if torch.empty_like(parameter).stride() == parameter.stride():
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
