"""Sums over an epoch or a data set: kept on the device while they grow, divided by nobody before the end."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel import Parallel
from trainer.task import Sums

FOLD_EVERY = 64
"""Additions after which the tensors kept so far are summed up: rare enough to cost nothing, and little memory."""


class Totals:
    """This process's share of some sums, and their weight, the number of loss terms.

    Adding only keeps the tensors, so that a step pays neither arithmetic nor a wait for the device.
    """

    def __init__(self, sums: Mapping[str, Tensor] | None = None, weight: float = 0.0) -> None:
        self._sums = dict(sums or {})
        self._weight = weight
        self._kept: list[Sums] = []

    def add(self, sums: Sums, weight: float) -> None:
        """sums: by name, any shape; always the same names and shapes."""
        self._kept.append(sums)
        self._weight += weight
        if len(self._kept) == FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        for name in self._kept[0] if self._kept else ():
            added = torch.stack([sums[name] for sums in self._kept]).double().sum(0)
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        self._kept = []

    def reduced(self, parallel: Parallel) -> dict[str, Tensor]:
        """The sums over all processes with "weight" among them, float64 on the CPU; {} if nothing was ever added.

        Waits for the device. All processes call it, and all have added something or none has.
        """
        self._fold()
        if not self._sums:
            return {}
        parts = {name: value.cpu() for name, value in self._sums.items()}
        parts["weight"] = torch.tensor(self._weight, dtype=torch.float64)
        flat = parallel.sum(torch.cat([part.flatten() for part in parts.values()]))
        sums = flat.split([part.numel() for part in parts.values()])
        return {name: value.view(part.shape) for (name, part), value in zip(parts.items(), sums, strict=True)}


def share_of(reduced: Mapping[str, Tensor], parallel: Parallel) -> Totals:
    """Reduced sums as the processes go on with them: the main one holds all of it, the others zeros."""
    share = 1 if parallel.is_main else 0
    sums = {name: (value * share).to(parallel.device) for name, value in reduced.items() if name != "weight"}
    return Totals(sums, share * float(reduced.get("weight", 0.0)))
