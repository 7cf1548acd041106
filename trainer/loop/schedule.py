"""The learning rate as a pure function of progress."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.config import FlagGroup, flag, flag_name, shown
from trainer.loading.errors import BadInput

Schedule = Literal["cosine", "linear", "constant", "wsd"]

OPTIMIZER_SETTINGS = {
    "betas": ("adamw", "adam", "muon"),
    "eps": ("adamw", "adam", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd",),
}
"""Flags that only some of the optimizers have, and which ones those are."""

WSD_DECAY_SHARE = 0.2
"""Of the run. A shorter decay ends worse, a longer one hardly better (Hägele et al., 2024, arXiv:2405.18392)."""


@dataclass
class LearningFlags(FlagGroup):
    """Learning"""

    optimizer: Literal["adamw", "adam", "sgd", "muon"] = flag(
        "adamw", "what makes a step of a gradient; muon: hidden matrices by Muon, the rest by adamw"
    )
    lr: float = flag(1e-3, "learning rate after warm-up", above=0)
    min_lr: float = flag(0.0, "learning rate at the end, of every schedule but constant", at_least=0)
    schedule: Schedule = flag(
        "cosine", "the learning rate after warm-up; wsd: constant, then down to --min-lr over the last fifth of the run"
    )
    warmup_epochs: float | None = flag(None, "epochs of linear warm-up (default: a tenth of the run)", at_least=0)
    warmup_steps: int | None = flag(None, "the same in optimizer steps", at_least=0)
    scale_lr: Literal["none", "linear", "sqrt"] = flag(
        "none", "multiply --lr by global batch / one-device batch, by its root, or not at all"
    )
    weight_decay: float = flag(
        0.01, "not applied to norms and biases; decoupled in adamw and muon, added to the gradient in adam and sgd",
        at_least=0,
    )  # fmt: skip
    betas: tuple[float, ...] | None = flag(
        None, "two decay rates of adamw and adam, also within muon (default: 0.9 0.999)", at_least=0, below=1
    )
    eps: float | None = flag(None, "added to the denominator by the same ones (default: 1e-08)", above=0)
    momentum: float | None = flag(None, "of sgd (default: 0) and muon (default: 0.95)", at_least=0, below=1)
    nesterov: bool = flag(False, "sgd: Nesterov's momentum, which muon always has")
    max_grad_norm: float = flag(1.0, "clip the norm of the whole gradient to this; 0 does not clip", at_least=0)
    ema_decay: float = flag(
        0.0,
        "evaluate and keep an exponential moving average of the weights, for example 0.999; 0 is off",
        at_least=0,
        below=1,
    )
    on_nonfinite: Literal["stop", "skip"] = flag(
        "stop", "when a loss or gradient is not finite: end the run, or leave that optimizer step out"
    )
    early_stopping_patience: int = flag(
        0, "stop after so many evaluations without a better validation score; 0 never stops early", at_least=0
    )

    def problems(self) -> list[str]:
        found = []
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr}: must not be above --lr {self.lr}")
        if self.min_lr > 0 and self.schedule == "constant":
            found.append(f"--min-lr {self.min_lr}: --schedule constant never comes down; leave one of them out")
        if self.warmup_epochs is not None and self.warmup_steps is not None:
            found.append("--warmup-epochs and --warmup-steps: exclude each other; give one")
        return found + self._problems_of_settings()

    def _problems_of_settings(self) -> list[str]:
        found = []
        for field, owners in OPTIMIZER_SETTINGS.items():
            value = getattr(self, field)
            if value is None or value is False or self.optimizer in owners:
                continue
            given = flag_name(field) if value is True else f"{flag_name(field)} {shown(value)}"
            names = " or ".join(owners)
            found.append(f"{given}: --optimizer {self.optimizer} has no such setting; leave it out, or take {names}")
        if self.betas is not None and len(self.betas) != 2:
            found.append(f"--betas {shown(self.betas)}: must be two values")
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            found.append("--nesterov: needs --momentum above 0")
        return found


def lr_factor(progress: float, warmup: float, total: float, floor: float, schedule: Schedule = "cosine") -> float:
    """The factor on the base learning rate: linear warm-up, then the schedule.

    progress, warmup, total: in one unit, 0 <= progress <= total. floor: factor at the end, in [0, 1]; not of
    "constant".

    "cosine" is that of Loshchilov and Hutter, 2017, eq. 5. "wsd" (warm-up, stable, decay: Hu et al., 2024,
    arXiv:2404.06395) falls as 1 - sqrt does, which ends better than a line (Hägele et al., 2024, section 3).

    The trainer asks at the middle of each global batch, which is the schedule's mean over it up to curvature: the
    first step is never 0, the last never the floor, and two batch sizes follow the same curve.
    """
    if progress < warmup:
        return progress / warmup
    if total <= warmup or schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return floor + (1 - floor) * (0.5 * (1 + math.cos(math.pi * (progress - warmup) / (total - warmup))))
    if schedule == "linear":
        return floor + (1 - floor) * (total - progress) / (total - warmup)
    start = max(warmup, (1 - WSD_DECAY_SHARE) * total)
    return floor + (1 - floor) * (1 - math.sqrt(max(progress - start, 0.0) / (total - start)))


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of a run. peak, floor: per step; warmup, total: in the unit of `Plan.total`.

    factor_of_step: a task's own `lr_factor`, which comes before the schedule; num_steps: what it is told of the whole
    run.
    """

    peak: float
    floor: float
    warmup: float
    total: float
    schedule: Schedule = "cosine"
    num_steps: int = 0
    factor_of_step: Callable[[int, int], float | None] | None = None

    def at(self, progress: float, step: int = 0) -> float:
        """progress: in the same unit. step: optimizer steps done before, which only a task's own factor asks for.

        Raises BadInput for a factor that is none.
        """
        factor = self.factor_of_step(step, self.num_steps) if self.factor_of_step is not None else None
        if factor is None:
            factor = lr_factor(progress, self.warmup, self.total, self.floor / self.peak, self.schedule)
        elif not 0 <= factor < math.inf:
            raise BadInput(
                f"the task's lr_factor({step}, {self.num_steps}) is {factor}; it must be a finite number, at least 0"
            )
        return self.peak * factor


def device_scaling_factor(rule: str, global_batch_size: int, one_device_batch_size: int) -> float:
    """By how much `--scale-lr` multiplies the learning rate.

    rule: "none"; "linear" (Goyal et al., 2017, section 2.1); "sqrt" (Krizhevsky, 2014, section 5).
    """
    ratio = global_batch_size / one_device_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
