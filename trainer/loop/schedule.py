"""Learning rate schedules, as pure functions of the training progress."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from trainer.common.errors import UserError

WSD_DECAY_SHARE = 0.2
"""Fraction of the run in which "wsd" decays; a longer decay helps little (Hägele et al., 2024, arXiv:2405.18392)."""


def lr_factor(progress: float, warmup: float, total: float, floor: float, schedule: str = "cosine") -> float:
    """Returns the factor that multiplies the peak learning rate: linear warm-up, then the schedule.

    progress, warmup, total: in the same unit, 0 <= progress <= total. floor: final factor in [0, 1], which "constant"
    ignores. "plateau" equals "constant" in this function, because only `LearningRate` reduces the rate.

    "cosine" follows Loshchilov and Hutter, 2017, eq. 5. "wsd" (warm-up, stable, decay: Hu et al., 2024,
    arXiv:2404.06395) uses the "1 - sqrt" decay (Hägele et al., 2024, sec. 3), which outperforms linear decay.

    The trainer evaluates the factor at the middle of each global batch, which approximates its mean over the batch. The
    first factor is thus above 0, the last factor is above the floor, and all batch sizes follow the same curve.
    """
    if progress < warmup:
        return progress / warmup
    if total <= warmup or schedule in ("constant", "plateau"):
        return 1.0
    if schedule == "cosine":
        return floor + (1 - floor) * (0.5 * (1 + math.cos(math.pi * (progress - warmup) / (total - warmup))))
    if schedule == "linear":
        return floor + (1 - floor) * (total - progress) / (total - warmup)
    assert schedule == "wsd", schedule
    start = max(warmup, (1 - WSD_DECAY_SHARE) * total)
    return floor + (1 - floor) * (1 - math.sqrt(max(progress - start, 0.0) / (total - start)))


@dataclass(frozen=True)
class LearningRate:
    """Learning rate of a run. peak: highest rate. floor: final rate. warmup, total: lengths in epochs or in steps.

    factor_of_step: `Task.lr_factor`, which can replace the schedule. num_steps: optimizer steps of the run. drop:
    factor by which "plateau" reduces the rate. patience: evaluations without improvement before each reduction.
    """

    peak: float
    floor: float
    warmup: float
    total: float
    schedule: str = "cosine"
    num_steps: int = 0
    factor_of_step: Callable[[int, int], float | None] | None = None
    drop: float = 1.0
    patience: int = 0

    def drops_after(self, num_evaluations: int) -> bool:
        """Returns whether "plateau" reduces the rate after `num_evaluations` evaluations without improvement."""
        return self.schedule == "plateau" and num_evaluations > 0 and num_evaluations % self.patience == 0

    def at(self, progress: float, step: int = 0, num_drops: int = 0) -> float:
        """Returns the learning rate. progress: training progress, in the unit of `total`.

        step: optimizer steps done, for `Task.lr_factor`. num_drops: reductions by "plateau" so far. Raises UserError if
        `Task.lr_factor` returns an invalid factor.
        """
        step = min(step, self.num_steps - 1)  # later epochs may have more steps than the first epoch
        factor = self.factor_of_step(step, self.num_steps) if self.factor_of_step is not None else None
        if factor is None:
            factor = lr_factor(progress, self.warmup, self.total, self.floor / self.peak, self.schedule)
            if self.schedule == "plateau":
                factor *= max(self.drop**num_drops, self.floor / self.peak)
        elif not (hasattr(factor, "__float__") and 0 <= factor < math.inf):
            raise UserError(
                f"the task's lr_factor({step}, {self.num_steps}) is {factor!r}; it must be a finite number, at least 0"
            )
        return self.peak * factor


def device_scaling_factor(rule: str, global_batch_size: int, one_device_batch_size: int) -> float:
    """Returns the factor by which `--scale-lr` multiplies the learning rate.

    rule: "none"; "linear" (Goyal et al., 2017, section 2.1); "sqrt" (Krizhevsky, 2014, section 5).
    """
    ratio = global_batch_size / one_device_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
