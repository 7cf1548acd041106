"""Data sets that are moved to a GPU and make their batches on the GPU (`--data-on`)."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.tensors import pinned
from trainer.loading.arrays import Array
from trainer.loading.batches import Batch, Collate
from trainer.loading.order import SampleKeys
from trainer.loading.workers import BatchLoader

M = TypeVar("M", bound="Movable")

MOST_TOGETHER, MOST_SAMPLES_TOGETHER = 32, 2**13
"""Maximum numbers of batches and of their samples that are made together, by the same kernel launches."""
ALIGNMENT = 16
"""Number of bytes at whose multiples a batch's tensors begin on a GPU; vectorised kernels read this many at once."""


class Movable:
    """Base class of data sets that can be moved to a device: arrays in attributes and dictionaries become tensors.

    A subclass must implement `__getitems__` for arrays and tensors alike, using only indexing by
    `self.here(keys.index)`, operators and functions of trainer.loading.arrays. The method must never wait for a device.

    device: None on the host.
    of_tensors: whether the attributes are tensors even on the host.
    stays: names of attributes that stay on the host, such as lengths that determine padding.
    rows_alike: whether a sample is independent of the other samples in its batch and of `SampleKeys.progress`, so that
        several batches can be made together.
    """

    device: torch.device | None = None
    of_tensors: ClassVar[bool] = False
    stays: ClassVar[frozenset[str]] = frozenset()
    rows_alike: ClassVar[bool] = False

    def here(self, values: np.ndarray) -> Array:
        """Copies host values, such as int64 indices, to the data set's device asynchronously."""
        if self.device is None:
            return torch.from_numpy(values) if self.of_tensors else values
        return pinned(torch.from_numpy(values), self.device).to(self.device, non_blocking=True)

    def weights(self, keys: SampleKeys) -> np.ndarray | None:
        """Returns each sample's number of loss terms, as float32 of shape (n,), computed from host data.

        Returns None by default; the host then reads the batch's "weight", and waits if a device computes it.
        """
        return None


def num_bytes(parts: Iterable[Movable]) -> int:
    """Returns the device memory in bytes that data sets need; a shared array counts once."""
    return sum({id(array): array.nbytes for part in parts for array in _arrays(part)}.values())


def _arrays(part: Any) -> Iterator[Array]:
    if isinstance(part, np.ndarray | Tensor):
        yield part
    else:
        for value in (part if isinstance(part, dict) else _moving(part)).values():
            yield from _arrays(value)


def _moving(part: Movable) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in part.stays and _is_moving(value)}


def _is_moving(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) > 0 and all(map(_is_moving, value.values()))
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"  # numbers, not strings or objects
    return is_array or isinstance(value, Movable | Tensor)


def moved(parts: Sequence[M], device: torch.device) -> list[M]:
    """Returns copies of data sets on a device; a shared array is copied once."""
    found: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if id(value) not in found:
            if isinstance(value, dict):
                found[id(value)] = {name: copied(each) for name, each in value.items()}
            elif isinstance(value, Movable):
                found[id(value)] = own = copy.copy(value)
                vars(own).update({name: copied(each) for name, each in _moving(value).items()}, device=device)
            else:
                # torch.tensor, unlike torch.from_numpy, does not warn about read-only memory maps
                is_tensor = isinstance(value, Tensor)
                found[id(value)] = value.to(device) if is_tensor else torch.tensor(value, device=device)
        return found[id(value)]

    return [copied(part) for part in parts]


class DeviceLoader(BatchLoader):
    """Makes batches on the device of the data sets.

    Only a batch's "index" and "weight" are on the host. Raises UserError if the weights of a phase's first batch differ
    from `Movable.weights`.
    """

    def __init__(self, datasets: Sequence[Movable], collate: Collate, device: torch.device) -> None:
        self._datasets, self._collate, self._device = datasets, collate, device
        self._unchecked = set(range(len(datasets)))
        self._most_samples = MOST_SAMPLES_TOGETHER

    def __call__(self, keys: Iterable[SampleKeys], ahead: bool = False) -> Iterator[Batch]:
        keys = iter(keys)
        while together := list(islice(keys, MOST_TOGETHER)):
            yield from self._drawn(together)

    def one(self, keys: SampleKeys) -> Batch:
        return self._batch(keys)

    def _drawn(self, keys: Sequence[SampleKeys]) -> Iterator[Batch]:
        """Yields a batch for each of `keys`; makes batches of the same phase and epoch together if `rows_alike`."""
        drawn: dict[int, Batch] = {}
        for position, key in enumerate(keys):
            if position not in drawn:
                group, whole = self._made_together(keys, position)
                sizes = [len(keys[i].index) for i in group]
                parts = {name: tensor.split(sizes) for name, tensor in whole.items()}
                for number, i in enumerate(group):
                    drawn[i] = {name: _aligned(split[number]) for name, split in parts.items()}
            batch = drawn.pop(position)
            if key.placeholder:
                batch["weight"] = torch.zeros_like(batch["weight"])
            yield batch

    def _made_together(self, keys: Sequence[SampleKeys], first: int) -> tuple[list[int], Batch]:
        """Makes batches together if memory allows; returns their positions in `keys`, and all samples as one batch."""
        while True:
            group = self._group(keys, first)
            try:
                return group, self._batch(replace(keys[first], index=np.concatenate([keys[i].index for i in group])))
            except torch.OutOfMemoryError:
                if len(group) == 1:
                    raise
                self._most_samples = 0
            torch.cuda.empty_cache()

    def _group(self, keys: Sequence[SampleKeys], first: int) -> list[int]:
        if not self._datasets[keys[first].phase].rows_alike:
            return [first]
        kinds = [(each.phase, each.epoch) for each in keys]
        alike = [i for i in range(first, len(keys)) if kinds[i] == kinds[first]]
        num_samples = np.cumsum([len(keys[i].index) for i in alike])
        return alike[: max(1, int(np.searchsorted(num_samples, self._most_samples, side="right")))]

    def _batch(self, keys: SampleKeys) -> Batch:
        keys = replace(keys, few_lengths=True)
        dataset: Any = self._datasets[keys.phase]
        batch = self._collate(dataset.__getitems__(keys), keys)
        known = dataset.weights(keys)
        if known is not None:
            self._check(keys.phase, dataset, batch["weight"], known)
            batch["weight"] = torch.from_numpy(known)
        for name in ("index", "weight"):
            batch[name] = pinned(batch[name].cpu(), self._device)
        return batch

    def _check(self, phase: int, dataset: Movable, own: Tensor, known: np.ndarray) -> None:
        if phase in self._unchecked and own.tolist() != known.tolist():
            raise UserError(
                f"{type(dataset).__name__}.weights: its values differ from the batch's 'weight' (first values: "
                f"{known.tolist()[:5]} and {own.tolist()[:5]}); make them equal, or remove the method"
            )
        self._unchecked.discard(phase)


def _aligned(tensor: Tensor) -> Tensor:
    """Copies a tensor on a GPU whose address would make kernels sum in another order than with a new tensor."""
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT else tensor
