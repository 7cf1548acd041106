"""An exponential moving average of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class ExponentialMovingAverage:
    """The moving average of a model's parameters; with decay 0 it is off and costs nothing.

    The decay grows with the number of updates, min(decay, (1 + n) / (10 + n)), so that short runs do not evaluate
    their initial weights (the `num_updates` rule of TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.enabled = decay > 0
        self._model = model
        self._decay = decay
        self._updates: int | Tensor = 0
        self._average: list[Tensor] = []
        self.restart()

    def restart(self) -> None:
        """Begins anew with the weights that the model has now."""
        self._updates = 0
        self._average = [p.detach().clone() for p in self._model.parameters()] if self.enabled else []

    def update(self, applied: bool | Tensor) -> None:
        """After an optimizer step. applied: whether it was; see `StepResult`."""
        if self.enabled:
            self._update(applied)

    @torch.no_grad()
    def _update(self, applied: bool | Tensor) -> None:
        if isinstance(applied, Tensor):
            self._update_without_waiting(applied)
        elif applied:
            decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
            get_ema_multi_avg_fn(decay)(self._average, list(self._model.parameters()), self._updates)
            self._updates += 1

    def _update_without_waiting(self, applied: Tensor) -> None:
        """The same where the host does not know whether: the number of updates is kept on the device."""
        updates = self._updates
        if not isinstance(updates, Tensor):
            updates = torch.full((), updates, dtype=torch.float64, device=applied.device)
        weight = applied * (1 - ((1 + updates) / (10 + updates)).clamp(max=self._decay))
        changes = torch._foreach_sub(list(self._model.parameters()), self._average)
        torch._foreach_mul_(changes, weight.to(changes[0].dtype))
        torch._foreach_add_(self._average, changes)
        self._updates = updates + applied

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model's weights are the average."""
        weights = [p.detach().clone() for p in self._model.parameters()] if self.enabled else []
        self._copy(self._average)
        try:
            yield
        finally:
            self._copy(weights)

    @torch.no_grad()
    def _copy(self, values: list[Tensor]) -> None:
        if self.enabled:
            for parameter, value in zip(self._model.parameters(), values, strict=True):
                parameter.copy_(value)

    def put_into(self, state: dict[str, Any]) -> None:
        """`model` becomes the average, which is what is worth deploying; `training_model` what training needs."""
        if self.enabled:
            state["training_model"] = state["model"]
            with self.applied():
                state["model"] = {name: value.clone() for name, value in self._model.state_dict().items()}
            state["average_updates"] = int(self._updates)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Call with the average in the model; the training weights are loaded afterwards."""
        if self.enabled:
            self.restart()
            self._updates = state.get("average_updates", 0)
