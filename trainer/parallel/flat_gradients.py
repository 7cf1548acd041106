"""Gradients that travel after the backward: as flat buffers, one for each type of number, and sparse ones by rows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.common.torch_private import foreach_copy_


class FlatGradients:
    """Sums the gradients of some parameters over processes, each in one exchange for all parameters of a type.

    A process need not have a gradient of every parameter. Behind the gradients travels how many processes have each
    one: only a process that lacks one reads that number, and so waits for its device.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in params:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        self._buffers = [_Buffer(same) for same in by_type.values()]

    def sum(self, sum_in_place: Callable[[Tensor], None]) -> None:
        """Afterwards `grad` is the sum over processes, and None where no process has a gradient.

        sum_in_place: sums a tensor of real numbers over the processes. All processes call it.
        """
        for buffer in self._buffers:
            buffer.sum(sum_in_place)


@torch.no_grad()
def sum_sparse(parameter: Tensor, sum_in_place: Callable[[Tensor], None], divisor: int) -> None:
    """Makes a sparse gradient the sum over processes, divided, with the rows that any of them has; None for no rows.

    parameter: (rows, ...). sum_in_place: sums a sparse tensor over the processes, each of which calls it.
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
    """The gradients of parameters of one type, in their order, and a number for each."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        num_elements = sum(parameter.numel() for parameter in params)
        self._flat = torch.zeros(num_elements + len(params), dtype=params[0].dtype, device=params[0].device)
        self._counts = self._flat[num_elements:]
        self._all_ones = torch.ones_like(self._counts)
        views = self._flat[:num_elements].split([parameter.numel() for parameter in params])
        self._views = [_laid_out_as(view, parameter) for view, parameter in zip(views, params, strict=True)]

    @torch.no_grad()
    def sum(self, sum_in_place: Callable[[Tensor], None]) -> None:
        grads = [parameter.grad for parameter in self._params]
        lacking = [number for number, grad in enumerate(grads) if grad is None]
        own = [(view, grad) for view, grad in zip(self._views, grads, strict=True) if grad is not None]
        if own:
            foreach_copy_([view for view, _ in own], [grad for _, grad in own])
        self._counts.copy_(self._all_ones)
        for number in lacking:
            self._views[number].zero_()
            self._counts[number] = 0
        sum_in_place(torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat)
        counts = self._counts.tolist() if lacking else [1] * len(grads)
        for parameter, view, count in zip(self._params, self._views, counts, strict=True):
            parameter.grad = view if count else None


def _laid_out_as(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of the flat tensor with the shape of the parameter, and its strides where these leave no gaps.

    Fused optimizers go through a parameter and its gradient by their place in memory.
    """
    if torch.empty_like(parameter).stride() == parameter.stride():
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
