"""The running statistics of batch norms, which a forward changes: those of a step that is not applied are undone."""

import torch
from torch import Tensor, nn


class RunningStatistics:
    """The running means and variances of a model's batch norms; without such layers it does nothing.

    They change in the forward, before anyone knows whether the step is finite, and would never recover from a NaN.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
        self._current = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._kept = [buffer.clone() for buffer in self._current]

    def keep(self) -> None:
        """Before a step."""
        for current, kept in zip(self._current, self._kept, strict=True):
            kept.copy_(current)

    def undo(self) -> None:
        """After a step that was broken off."""
        for current, kept in zip(self._current, self._kept, strict=True):
            current.copy_(kept)

    def undo_unless(self, applied: bool | Tensor) -> None:
        """After a step. applied: whether it was; see `StepResult`."""
        if isinstance(applied, Tensor):
            for current, kept in zip(self._current, self._kept, strict=True):
                current.copy_(torch.where(applied, current, kept))
        elif not applied:
            self.undo()
