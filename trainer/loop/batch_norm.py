"""Statistics that a forward changes: those of a step that is not applied are undone."""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """The running means and variances of a model's batch norms; without such layers it does nothing.

    They change in the forward, before anyone knows whether the step is finite, and would never recover from a NaN.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._current = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._kept = [buffer.clone() for buffer in self._current]

    def keep(self) -> None:
        """Before a step."""
        if self._current:
            torch._foreach_copy_(self._kept, self._current)

    def undo(self) -> None:
        """After a step that was broken off."""
        if self._current:
            torch._foreach_copy_(self._current, self._kept)

    def undo_unless_finite(self, grad_norm: Tensor) -> None:
        """After a step, with the norm of its whole gradient."""
        if not self._current:
            return
        if grad_norm.device.type == "cpu":
            if not math.isfinite(grad_norm.item()):
                self.undo()
            return
        finite = torch.isfinite(grad_norm)
        for current, kept in zip(self._current, self._kept, strict=True):
            current.copy_(torch.where(finite, current, kept))
