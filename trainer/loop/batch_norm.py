"""The running statistics of batch norms, which a forward changes: agreed on by all processes, or undone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from trainer.parallel.base import Parallel


class RunningStatistics:
    """The running means and variances of a model's batch norms; without such layers it does nothing.

    They change in the forward, before anyone knows whether the step is finite, and would never recover from a NaN.
    After each step they are the same on every process, so that a checkpoint at any step has all there is.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._current = [*self._statistics, *(buffer for buffer in buffers if not buffer.is_floating_point())]
        self._kept = [buffer.clone() for buffer in self._current]
        self._num_samples = 0
        self._pending: tuple[Tensor, Callable[[], None]] | None = None

    def keep(self) -> None:
        """Before a step."""
        self._num_samples = 0
        for current, kept in zip(self._current, self._kept, strict=True):
            kept.copy_(current)

    def of_samples(self, num_samples: int) -> AbstractContextManager[None]:
        """Around the forward of a micro-batch. num_samples: those that count; the forward of none leaves no trace.

        But for `num_batches_tracked`, since every process has equally many micro-batches.
        """
        self._num_samples += num_samples
        return nullcontext() if num_samples > 0 or not self._statistics else self._unchanged()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        before = [statistic.clone() for statistic in self._statistics]
        yield
        for statistic, value in zip(self._statistics, before, strict=True):
            statistic.data.copy_(value)  # unseen by autograd, whose backward does not need them

    def start_agreement(self, parallel: Parallel) -> None:
        """After the last forward of a step, so that it travels during the backward. All call it, and then `agree`.

        On some process samples must have counted.
        """
        if not self._statistics or parallel.shard[1] == 1:
            return
        changes = torch._foreach_sub(self._statistics, self._kept[: len(self._statistics)])
        one = torch.ones_like(changes[0][:1])
        flat = torch.cat([*(change.flatten() for change in changes), one]) * self._num_samples
        self._pending = flat, parallel.start_sum_in_place(flat)

    def agree(self) -> None:
        """After the last backward: they change by the mean of their changes on all processes, weighted by samples."""
        if self._pending is None:
            return
        flat, wait = self._pending
        self._pending = None
        wait()
        means = (flat[:-1] / flat[-1]).split([statistic.numel() for statistic in self._statistics])
        kept = self._kept[: len(self._statistics)]
        for statistic, before, mean in zip(self._statistics, kept, means, strict=True):
            torch.add(before, mean.view_as(before), out=statistic)

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
