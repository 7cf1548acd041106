"""What a forward changes, running statistics of batch norms above all: agreed on by all processes, or undone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from trainer.loop.forward_state import ForwardState
from trainer.parallel.base import Parallel


class Buffers:
    """The running means and variances of a model's batch norms; without such layers it does nothing.

    They change in the forward, before anyone knows whether the step is finite, and would never recover from a NaN.
    After each step they are the same on every process, so that a checkpoint at any step has all there is.

    others: what else forwards change.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        # Of many layers each kind is copied as one, since a GPU takes as long to start on a small tensor as to copy it.
        self._statistics = FlatTensors([buffer for buffer in buffers if buffer.is_floating_point()])
        counters = FlatTensors([buffer for buffer in buffers if not buffer.is_floating_point()])
        self._kinds = [kind for kind in (self._statistics, counters) if kind]
        self.forward_state = ForwardState(model, without=norms)
        self._num_samples = 0
        self._before_placeholder: Tensor | None = None
        self._pending: tuple[Tensor, Callable[[], None]] | None = None

    def keep(self) -> None:
        """Before a step."""
        self._num_samples, self._before_placeholder = 0, None
        for kind in self._kinds:
            kind.keep()
        self.forward_state.keep()

    def of_samples(self, num_samples: int) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch. num_samples: those that count; of none it leaves no trace.

        But for `num_batches_tracked` and other numbers, since every process has equally many micro-batches.
        """
        self._num_samples += num_samples
        return nullcontext() if num_samples > 0 else self._unchanged()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        self._before_placeholder = before = self._statistics.flattened()
        with self.forward_state.unchanged():
            yield
        self._before_placeholder = None
        if self._statistics:
            self._statistics.set(before)

    def start_agreement(self, parallel: Parallel) -> None:
        """After the last forward of a step, so that it travels during the backward. All call it, and then `agree`.

        On some process samples must have counted. No backward in train mode reads running statistics.
        """
        if parallel.world_size == 1 or not self._statistics:
            return
        before = self._before_placeholder  # of the last micro-batch, if that is one
        changes = (self._statistics.flattened() if before is None else before) - self._statistics.kept
        flat = torch.cat([changes, torch.ones_like(changes[:1])]) * self._num_samples
        self._pending = flat, parallel.start_sum_in_place(flat)

    def agree(self, parallel: Parallel) -> None:
        """After the last backward: they change by the mean of their changes on all processes, weighted by samples.

        Raises UserError as `ForwardState.agree` does.
        """
        self.forward_state.agree(parallel)
        if self._pending is None:
            return
        flat, wait = self._pending
        self._pending = None
        wait()
        self._statistics.set(self._statistics.kept + flat[:-1] / flat[-1])

    def undo(self) -> None:
        """After a step that was broken off."""
        for kind in self._kinds:
            kind.set(kind.kept)
        self.forward_state.undo()

    def undo_unless(self, applied: bool | Tensor) -> None:
        """After a step. applied: whether it was; see `StepResult`."""
        if isinstance(applied, Tensor):
            for kind in self._kinds:
                kind.set(torch.where(applied, kind.flattened(), kind.kept))
            self.forward_state.undo_unless(applied)
        elif not applied:
            self.undo()


class FlatTensors:
    """Tensors that are handled as one. kept: a copy of them, in one dimension."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self.kept = self.flattened()

    def __bool__(self) -> bool:
        return bool(self._flat)

    def flattened(self) -> Tensor:
        """Their values, in one dimension."""
        return torch.cat(self._flat) if self._flat else torch.empty(0)

    def keep(self) -> None:
        torch.cat(self._flat, out=self.kept)

    def set(self, values: Tensor) -> None:
        """values: as `flattened` gave them."""
        # Unseen by autograd, whose backward does not need them.
        torch._foreach_copy_([flat.data for flat in self._flat], values.split(self._sizes))
