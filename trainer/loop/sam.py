"""Sharpness-aware minimization (`--sam-rho`): takes each step's gradient at weights moved along a first gradient.

Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR
2021. Both gradients cover the whole global batch, with the same dropout masks. The step therefore does not depend on
the number of devices or accumulation steps, unlike implementations that move weights by each micro-batch's gradient.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.torch_private import foreach_add_, foreach_copy_, foreach_mul_
from trainer.loading.batches import WeightedBatch
from trainer.loop.learner import Learner
from trainer.loop.precision import gradient_norm
from trainer.loop.watch import Watch
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Sums

LEAST_NORM = 1e-12
"""Constant added to the norm by which the first gradient is divided, as in the reference implementation."""


def refuse_sam(rho: float, objective: Objective, strategy: Strategy) -> None:
    """Raises UserError if another option does not support SAM's two gradients per step."""
    others = {
        f"--parts {strategy.num_parts}": strategy.num_parts > 0,
        "--multi-gpu fsdp": strategy.exchanges_in_forward,
        f"{type(objective).__name__}.joint_loss": objective.is_joint,
    }
    found = next((other for other, is_there in others.items() if is_there), None)
    if rho > 0 and found is not None:
        raise UserError(f"--sam-rho {rho:g}: a step needs two gradients, but {found} supports only one; omit --sam-rho")


@dataclass
class SamLearner(Learner, Watch):
    """Learner that takes SAM steps. rho: distance by which weights move along the first gradient."""

    rho: float = field(kw_only=True)

    def remarks(self) -> Sequence[str]:
        return [f"--sam-rho {self.rho:g}: every step takes two forward and backward passes."]

    def accumulate_window(
        self, phase: str, window: Sequence[WeightedBatch], factor: float, key: tuple[int, ...]
    ) -> Sums:
        """Works like `Learner.accumulate_window`; sums and buffers come from the first pass, before weights move."""
        sums = super().accumulate_window(phase, window, factor, key)
        sums = {name: value.detach() for name, value in sums.items()}
        params = self.params[phase]
        if self.buffers.is_active:
            self.buffers.agree(self.strategy)
        self.strategy.exchange(params)
        moved: list[Tensor] = [parameter for parameter in params if parameter.grad is not None]
        kept = [parameter.detach().clone() for parameter in moved]
        try:
            for watch in self.watches:
                watch.at("update")
            self._move(moved, [parameter.grad for parameter in params if parameter.grad is not None])
            for parameter in params:
                parameter.grad = None
            with self.buffers.left_alone() if self.buffers.is_active else nullcontext():
                super().accumulate_window(phase, window, factor, key)
        finally:  # a rescue (a save after a failure) needs the unmoved weights
            foreach_copy_([parameter.data for parameter in moved], kept)
            for watch in self.watches:
                watch.at("forward")
        return sums

    @torch.no_grad()
    def _move(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Moves weights by a distance of `rho` along the gradient. Raises UserError for sparse gradients.

        A non-finite gradient makes the moved weights and then the second gradient NaN, so the step is skipped.
        """
        if any(grad.is_sparse for grad in grads):
            raise UserError(
                f"--sam-rho {self.rho:g}: does not support sparse gradients; build embeddings without sparse=True"
            )
        if grads:
            foreach_mul_(grads, self.rho / (gradient_norm(grads) + LEAST_NORM))
            foreach_add_(params, grads)
