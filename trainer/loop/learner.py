"""The model with its loss, and everything that an optimizer step reads or changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.loop.batch_norm import RunningStatistics
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.precision import Precision
from trainer.task import Objective


@dataclass
class Learner:
    """What learns.

    objective: as the task built it. net: the same in the run's precision, wrapped for its devices; what training calls.
    optimizers: of each phase, one or several. max_grad_norm: 0 does not clip. params: what each phase trains.
    """

    objective: Objective
    net: nn.Module
    precision: Precision
    optimizers: dict[str, list[torch.optim.Optimizer]]
    max_grad_norm: float
    ema: ExponentialMovingAverage
    params: dict[str, list[Tensor]] = field(init=False)
    batch_norm: RunningStatistics = field(init=False)

    def __post_init__(self) -> None:
        self.batch_norm = RunningStatistics(self.objective)
        self.params = {
            phase: [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            for phase, optimizers in self.optimizers.items()
        }

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(p.numel() for p in self.objective.parameters())

    def set_learning_rate(self, phase: str, learning_rate: float) -> None:
        """That of the phase's next step, before each group's own factor on it."""
        for optimizer in self.optimizers[phase]:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group.get("lr_scale", 1.0)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Weights to begin with; those of a checkpoint that is only used are averaged already, if at all."""
        self.objective.model.load_state_dict(weights)
        self.ema.restart()
