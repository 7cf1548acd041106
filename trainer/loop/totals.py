"""Sums over an epoch or a data set: kept on the device while they grow, divided by nobody before the end."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.base import Parallel
from trainer.task import Sums

FOLD_EVERY = 64
"""Additions after which the tensors kept so far are summed up: rare enough to cost nothing, and little memory."""


class Totals:
    """This process's share of some sums, and their weight, the number of loss terms.

    Adding only keeps the tensors, so that a step pays neither arithmetic nor a wait for the device.
    """

    def __init__(self, sums: Mapping[str, Tensor] | None = None) -> None:
        self._sums = dict(sums or {})
        self._kept: list[Sums] = []
        self._weights: list[float] = []
        self._applied: list[Tensor] = []

    def add(self, sums: Sums, weight: float, applied: bool | Tensor = True) -> None:
        """sums: by name, any shape; always the same names and shapes.

        applied: of a step of training, whether it was (see `StepResult`); one that was not does not count.
        """
        if isinstance(applied, Tensor):
            self._applied.append(applied)
        elif not applied:
            sums, weight = {name: torch.zeros_like(value) for name, value in sums.items()}, 0.0
        self._kept.append(sums)
        self._weights.append(weight)
        if len(self._kept) == FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        if not self._kept:
            return
        counts = torch.stack(self._applied) if self._applied else None
        device = next((value.device for value in self._kept[0].values()), torch.device("cpu"))
        parts = {name: torch.stack([sums[name] for sums in self._kept]) for name in self._kept[0]}
        weights = torch.tensor(self._weights, dtype=torch.float64, pin_memory=device.type == "cuda")
        parts["weight"] = weights.to(device, non_blocking=True)
        for name, part in parts.items():
            if counts is not None:
                part = torch.where(counts.view(-1, *[1] * (part.dim() - 1)), part, 0)
            added = part.double().sum(0)
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        self._kept, self._weights, self._applied = [], [], []

    def unreduced(self) -> dict[str, Tensor]:
        """The same of this process alone, which calls it alone."""
        self._fold()
        return {name: value.cpu() for name, value in self._sums.items()}

    def reduced(self, parallel: Parallel) -> dict[str, Tensor]:
        """The sums over all processes with "weight" among them, float64 on the CPU; {} if nothing was ever added.

        Waits for the device. All processes call it, and all have added something or none has.
        """
        parts = self.unreduced()
        if not parts:
            return {}
        names = sorted(parts)  # a task may name them in another order in each process, as those of a set
        flat = parallel.sum(torch.cat([parts[name].flatten() for name in names]))
        sums = dict(zip(names, flat.split([parts[name].numel() for name in names]), strict=True))
        return {name: sums[name].view(part.shape) for name, part in parts.items()}


def share_of(reduced: Mapping[str, Tensor], parallel: Parallel) -> Totals:
    """Reduced sums as the processes go on with them: the main one holds all of it, the others zeros."""
    share = 1 if parallel.is_main else 0
    return Totals({name: (value * share).to(parallel.device) for name, value in reduced.items()})


def counted(sums: Sums, counts: bool) -> Sums:
    """The sums of a micro-batch, or zeros for a process's placeholder where it has no samples.

    They are replaced, not multiplied: zero times infinity is NaN, on all ranks.
    """
    if counts:
        return sums
    return {name: torch.where(torch.zeros_like(value, dtype=torch.bool), value, 0) for name, value in sums.items()}
