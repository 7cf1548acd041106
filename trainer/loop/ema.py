"""Averages weights for evaluation and deployment; checkpoints contain the averaged and the raw weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.common.errors import UserError
from trainer.common.tensors import local_shards
from trainer.common.torch_private import foreach_add_, foreach_mul_, foreach_sub


class ExponentialMovingAverage:
    """Exponential moving average of a model's parameters; with decay 0, nothing is averaged or stored.

    Each step updates the average of its phase's parameters. After n updates of the phase the decay is min(decay,
    (1 + n) / (10 + n)), so that the average of a short run is not mostly the initial weights (the `num_updates` rule of
    TensorFlow's ExponentialMovingAverage).

    If an optimizer averages weights itself, as schedule-free optimizers do (Defazio et al., 2024, arXiv:2405.15682),
    this class uses the optimizer's average, computed on demand from its state.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self.decay = decay
        self._averaging: list[Optimizer] = []
        self._updates: dict[str, int | Tensor] = {}
        self._average: dict[Tensor, Tensor] = {}
        self.is_applied = False
        """Whether the model's parameters contain the average, or a swap with the average is in progress."""
        self.restart()

    @property
    def enabled(self) -> bool:
        return self.decay > 0 or bool(self._averaging)

    def restart(self) -> None:
        """Restarts the average from the model's current weights."""
        self._updates = {}
        self._average = {p: p.detach().clone() for p in self._model.parameters()} if self.decay > 0 else {}
        self._averaging = []

    def leave_to(self, optimizers: Sequence[Optimizer]) -> None:
        """Uses the averages of optimizers that average weights themselves.

        Raises UserError if decay > 0 and an optimizer averages weights, or if two such optimizers share a parameter.
        """
        self._averaging = [optimizer for optimizer in optimizers if keeps_average(optimizer)]
        params = _params_of(self._averaging)
        if self._averaging and self.decay > 0:
            raise UserError(
                f"--ema-decay {self.decay:g}: {type(self._averaging[0]).__name__} averages the weights "
                "itself; leave the flag out"
            )
        if len(set(params)) < len(params):
            raise UserError(
                "Task.build_optimizers: two phases train a parameter with averaging optimizers, such as "
                f"{type(self._averaging[-1]).__name__}, but only one can provide its average; choose non-averaging "
                "optimizers in all phases but one"
            )

    @torch.no_grad()
    def update(self, applied: bool | Tensor, phase: str, params: Sequence[nn.Parameter]) -> None:
        """Updates the average of `params` after their phase's step. applied: whether the step changed the weights."""
        if not self._average:
            return
        updates = self._updates.get(phase, 0)
        average, own = local_shards([self._average[p] for p in params]), local_shards(params)
        if not isinstance(applied, Tensor):
            if applied:
                get_ema_multi_avg_fn(min(self.decay, (1 + updates) / (10 + updates)))(average, own, updates)
                self._updates[phase] = updates + 1
            return
        # The host does not know `applied`, so the number of updates is a device tensor. Each step updates it in place,
        # so that a rescue (a save after a failure) reads the number after the last finished step.
        if not isinstance(updates, Tensor):
            updates = self._updates[phase] = torch.full((), updates, dtype=torch.float64, device=applied.device)
        weight = applied * (1 - ((1 + updates) / (10 + updates)).clamp(max=self.decay))
        changes = foreach_sub(own, average)
        foreach_mul_(changes, weight.to(changes[0].dtype))
        foreach_add_(average, changes)
        updates += applied

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model's parameters contain the average."""
        self.is_applied = self.enabled
        average = self._evaluated()
        _exchange(average)
        try:
            yield
        finally:
            _exchange(average)
            self.is_applied = False

    @torch.no_grad()
    def _evaluated(self) -> dict[Tensor, Tensor]:
        if not self._averaging:
            return self._average
        params = _params_of(self._averaging)
        before = [p.detach().clone() for p in params]
        for optimizer in self._averaging:
            optimizer.eval()  # type: ignore[attr-defined]
        average = {p: p.detach().clone() for p in params}
        for optimizer in self._averaging:
            optimizer.train()  # type: ignore[attr-defined]
        for p, value in zip(params, before, strict=True):
            p.copy_(value)
        return average

    def put_into(
        self, state: dict[str, Any], full_weights: Callable[[nn.Module, Mapping[Tensor, Tensor]], dict[str, Any]]
    ) -> None:
        """Stores averaged weights as state["model"], and raw weights, to resume from, as state["training_model"].

        All processes must call this method.
        """
        if self.enabled:
            state["training_model"] = state["model"]
            state["model"] = full_weights(self._model, self._evaluated())
            state["average_updates"] = {phase: int(updates) for phase, updates in self._updates.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the average from a checkpoint whose averaged weights are already in the model."""
        if self.enabled:
            self.restart()
            self._updates = dict(state.get("average_updates", {}))


def keeps_average(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer has `eval()`, to load averaged weights, and `train()`, to load raw weights."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def _params_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def _exchange(values: Mapping[Tensor, Tensor]) -> None:
    for parameter, value in values.items():
        before = parameter.clone()
        parameter.copy_(value)
        value.copy_(before)
