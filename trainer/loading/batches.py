"""Types of batches and data sets, and a function that makes a batch from `SampleKeys`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys

Batch = dict[str, Tensor]


class WeightedBatch(NamedTuple):
    """A batch in host memory and its weight: the number of its loss terms.

    num_samples: number of samples, 0 for a placeholder batch of a process without samples. A batch of real samples may
    also have weight 0, for example if the samples have no labels.
    """

    batch: Batch
    weight: float
    num_samples: int


def weighted(batch: Batch, is_placeholder: bool = False) -> WeightedBatch:
    """Returns a WeightedBatch with the samples' total weight. Raises UserError for a negative or non-finite weight."""
    of_samples = batch["weight"].tolist()
    weight = math.fsum(of_samples) if min(of_samples, default=0.0) >= 0 else math.nan
    if not weight < math.inf:
        wrong = next(each for each in of_samples if not 0 <= each < math.inf)
        raise UserError(f"batch['weight'] must be finite and non-negative, but a sample has {wrong}")
    return WeightedBatch(batch, weight, 0 if is_placeholder else len(of_samples))


class KeyedDataset(Protocol):
    """Protocol of data sets that gather a whole batch at once."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: SampleKeys) -> Any: ...


Collate = Callable[[Any, SampleKeys], Batch]


def gathered(dataset: KeyedDataset, collate: Collate, keys: SampleKeys) -> Batch:
    """Makes a batch of the samples that `keys` identify; a placeholder batch has weights of 0."""
    batch = collate(dataset.__getitems__(keys), keys)
    if keys.placeholder:
        batch["weight"] = torch.zeros_like(batch["weight"])
    return batch


def of_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Converts a batch's floating-point tensors to a dtype, and complex tensors to the corresponding complex dtype."""
    return {name: in_dtype(tensor, dtype) for name, tensor in batch.items()}


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a floating-point or complex tensor as `of_dtype` does; returns any other tensor unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
