"""The learning rate as a pure function of progress."""

import math
from dataclasses import dataclass
from typing import Literal

from trainer.config import FlagGroup, flag


@dataclass
class LearningFlags(FlagGroup):
    """Learning"""

    lr: float = flag(1e-3, "learning rate after warm-up (AdamW)", above=0)
    min_lr: float = flag(0.0, "learning rate at the end of the cosine", at_least=0)
    warmup_epochs: float | None = flag(None, "epochs of linear warm-up (default: a tenth of --epochs)", at_least=0)
    warmup_steps: int | None = flag(None, "the same in optimizer steps", at_least=0)
    scale_lr: Literal["none", "linear", "sqrt"] = flag(
        "none", "multiply --lr by global batch / one-device batch, by its root, or not at all"
    )
    weight_decay: float = flag(0.01, "decoupled weight decay, not applied to norms and biases", at_least=0)
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
        0, "stop after so many epochs without a better validation score; 0 never stops early", at_least=0
    )

    def problems(self) -> list[str]:
        found = []
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr}: must not be above --lr {self.lr}")
        if self.warmup_epochs is not None and self.warmup_steps is not None:
            found.append("--warmup-epochs and --warmup-steps: exclude each other; give one")
        return found


def lr_factor(progress: float, warmup: float, total: float, floor: float) -> float:
    """The factor on the base learning rate: linear warm-up, then a cosine (Loshchilov and Hutter, 2017, eq. 5).

    progress, warmup, total: in epochs, 0 <= progress <= total. floor: factor at the end, in [0, 1].

    The trainer asks at the middle of each global batch, which is the schedule's mean over it up to curvature: the
    first step is never 0, the last never the floor, and two batch sizes follow the same curve.
    """
    if progress < warmup:
        return progress / warmup
    if total <= warmup:
        return 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (total - warmup)))
    return floor + (1 - floor) * cosine


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of a run. peak, floor: per step; warmup, total: in epochs."""

    peak: float
    floor: float
    warmup: float
    total: float

    def at(self, progress: float) -> float:
        return self.peak * lr_factor(progress, self.warmup, self.total, self.floor / self.peak)


def device_scaling_factor(rule: str, global_batch_size: int, one_device_batch_size: int) -> float:
    """By how much `--scale-lr` multiplies the learning rate.

    rule: "none"; "linear" (Goyal et al., 2017, section 2.1); "sqrt" (Krizhevsky, 2014, section 5).
    """
    ratio = global_batch_size / one_device_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
