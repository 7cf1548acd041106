"""What the command line says about learning."""

from dataclasses import dataclass
from typing import Literal

from trainer.config import FlagGroup, flag, given_flags, shown
from trainer.loop.schedule import Schedule

OPTIMIZER_SETTINGS = {
    "betas": ("adamw", "adam", "muon"),
    "eps": ("adamw", "adam", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd",),
}
"""Flags that only some of the optimizers have, and which ones those are."""


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
            names = " or ".join(owners)
            if self.optimizer not in owners:
                found += [
                    f"{given}: --optimizer {self.optimizer} has no such setting; leave it out, or take {names}"
                    for given in given_flags(self, [field])
                ]
        if self.betas is not None and len(self.betas) != 2:
            found.append(f"--betas {shown(self.betas)}: must be two values")
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            found.append("--nesterov: needs --momentum above 0")
        return found
