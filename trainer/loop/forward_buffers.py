"""Buffers that forwards change, as queues and codebooks: those of the main process after every step, or undone."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.parallel.base import Parallel


class ForwardBuffers:
    """A part of `RunningStatistics`, for buffers of any meaning; most models have none.

    Each process changes them by its own samples, of which those of the main process count, as by torch's
    DistributedDataParallel. A save or an evaluation, before which all get its buffers, then changes nothing.
    """

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        self._kept: list[Tensor] = []

    def add(self, model: nn.Module, buffers: Iterable[str]) -> None:
        """buffers: their names within the model. A forward may also put another tensor in the place of one."""
        for path in buffers:
            module, _, name = path.rpartition(".")
            place = model.get_submodule(module), name
            if place not in self._places:
                self._places.append(place)

    def keep(self) -> None:
        """Before a step."""
        self._kept = [tensor.clone() for tensor in self._tensors()]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a forward whose samples do not count."""
        before = [tensor.clone() for tensor in self._tensors()]
        yield
        self._set(before)

    def agree(self, parallel: Parallel) -> None:
        """After the last forward of a step. All processes call it."""
        self._set([parallel.from_main(tensor) for tensor in self._tensors()])

    def undo(self) -> None:
        """After a step that was broken off."""
        self._set(self._kept)

    def undo_unless(self, applied: Tensor) -> None:
        """After a step. applied: whether it was, on the device."""
        self._set([torch.where(applied, *both) for both in zip(self._tensors(), self._kept, strict=True)])

    def _tensors(self) -> list[Tensor]:
        return [getattr(module, name).detach() for module, name in self._places]

    def _set(self, values: list[Tensor]) -> None:
        for tensor, value in zip(self._tensors(), values, strict=True):
            if tensor is not value:
                tensor.data.copy_(value)  # unseen by autograd, whose backward may be under way
