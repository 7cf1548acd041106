"""From sample keys to batches."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys

Batch = dict[str, Tensor]


class WeightedBatch(NamedTuple):
    """A batch, still in host memory, with the number of its loss terms as its weight.

    num_samples: 0 for the placeholder of a process that has none. A batch of some may weigh nothing, as where no sample
    has a label, and have a loss nonetheless.
    """

    batch: Batch
    weight: float
    num_samples: int


def weighted(batch: Batch, is_placeholder: bool = False) -> WeightedBatch:
    """The batch with the number of its loss terms. Raises UserError where that is none."""
    of_samples = batch["weight"].tolist()
    weight = math.fsum(of_samples)
    if not 0 <= weight < math.inf:
        raise UserError(f"Task.collate: batch['weight'] adds up to {weight}: must be numbers of loss terms, at least 0")
    return WeightedBatch(batch, weight, 0 if is_placeholder else len(of_samples))


class KeyedDataset(Protocol):
    """A data set that gathers a whole batch at once."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: SampleKeys) -> Any: ...


Collate = Callable[[Any, SampleKeys], Batch]


class PhaseDatasets:
    """The data set of each phase as one, so that one set of workers loads all of them."""

    def __init__(self, datasets: Sequence[KeyedDataset]) -> None:
        self.datasets = datasets

    def __len__(self) -> int:
        return len(self.datasets[0])

    def __getitems__(self, keys: SampleKeys) -> Any:
        return self.datasets[keys.phase].__getitems__(keys)


def gathered(dataset: KeyedDataset, collate: Collate, keys: SampleKeys) -> Batch:
    """The batch of a data set that keys name, in this process."""
    batch = collate(dataset.__getitems__(keys), keys)
    if keys.placeholder:
        batch["weight"] = torch.zeros_like(batch["weight"])
    return batch
