"""Batches, their weights, and how they are gathered from sample keys."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys

Batch = dict[str, Tensor]


class WeightedBatch(NamedTuple):
    """A batch in host memory, weighted by its number of loss terms.

    num_samples: 0 for the placeholder of a process without samples. A real batch may weigh 0, for example without
    labels, and still have a loss.
    """

    batch: Batch
    weight: float
    num_samples: int


def weighted(batch: Batch, is_placeholder: bool = False) -> WeightedBatch:
    """Adds a batch's weight. Raises UserError for an invalid one."""
    of_samples = batch["weight"].tolist()
    weight = math.fsum(of_samples)
    if not 0 <= weight < math.inf:
        raise UserError(f"Task.collate: batch['weight'] must be finite and non-negative (its sum is {weight})")
    return WeightedBatch(batch, weight, 0 if is_placeholder else len(of_samples))


class KeyedDataset(Protocol):
    """A data set that gathers a whole batch at once."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: SampleKeys) -> Any: ...


Collate = Callable[[Any, SampleKeys], Batch]


class PhaseDatasets:
    """The data sets of all phases as one, so that one set of workers loads them."""

    def __init__(self, datasets: Sequence[KeyedDataset]) -> None:
        self.datasets = datasets

    def __len__(self) -> int:
        return len(self.datasets[0])

    def __getitems__(self, keys: SampleKeys) -> Any:
        return self.datasets[keys.phase].__getitems__(keys)


def gathered(dataset: KeyedDataset, collate: Collate, keys: SampleKeys) -> Batch:
    """Gathers the batch of some keys in this process."""
    batch = collate(dataset.__getitems__(keys), keys)
    if keys.placeholder:
        batch["weight"] = torch.zeros_like(batch["weight"])
    return batch
