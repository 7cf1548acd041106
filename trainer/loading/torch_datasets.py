"""Adapts data sets of torch.utils.data for the trainer (`from_dataset`)."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from trainer.common.errors import UserError
from trainer.loading.batches import KeyedDataset
from trainer.loading.counter_random import random_bits
from trainer.loading.on_device import Movable
from trainer.loading.order import SampleKeys


def from_dataset(
    dataset: Any,
    collate: Callable[[list[Any]], Any] | None = None,
    *,
    seed: int,
    names: Sequence[str] | None = None,
) -> KeyedDataset:
    """Adapts a map-style dataset, with `__len__` and `__getitem__(i)`, for `Task.splits`.

    Example: `from_dataset(CIFAR10(path, transform=transform), seed=self.seed, names=("image", "label"))`.

    Without `collate`, a TensorDataset, a Subset of one, or a dictionary of arrays or tensors of equal length gathers
    whole batches at once, and can be placed on a GPU (`--data-on`).

    Random numbers that an item draws from `random`, `numpy.random` and PyTorch's default generator, for example in its
    transforms, are a function of (seed, epoch, index): they are the same in any batch, worker or process, before and
    after a resume. The states of the three named generators are restored after each batch. Other generators, such as a
    transform's own `np.random.default_rng()` or a generator on a GPU, are not seeded, so their numbers may vary.

    dataset: a map-style dataset, or a dictionary of arrays or tensors.
    collate: makes a batch from a list of items. A batch is a dictionary, a tuple or a single value, and dim 0 of its
        tensors and arrays is the batch dimension. `collate` must not draw random numbers, because batches differ
        with the number of processes. Default: PyTorch's `default_collate`, as in a DataLoader.
    seed: usually the task's seed.
    names: names for the parts of a tuple item, or for a single value; dictionaries and named tuples have names already.

    Raises UserError, at once or with the first batch, if items cannot become a dictionary of tensors.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset):
        return _of_arrays(dataset)
    if isinstance(dataset, IterableDataset):
        raise UserError(_iterable(f"from_dataset({kind})"))
    if isinstance(dataset, DataLoader):
        raise UserError("from_dataset(DataLoader): a DataLoader makes its own batches; pass `loader.dataset`")
    if isinstance(dataset, str | bytes):
        raise UserError(
            f"from_dataset({kind}): needs a data set, not the string {dataset!r}; if it names a file, load the "
            "file and pass its samples as a data set"
        )
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise UserError(f"from_dataset({kind}): needs a map-style dataset with `{method}`")
    _require_whole_length(dataset, f"from_dataset({kind})")
    keyed = _DatasetItems(f"from_dataset({kind})", collate or default_collate, seed, names, dataset)
    tensors = _tensors_of(dataset) if collate is None else None
    return keyed if tensors is None else _KeyedTensors(keyed.named(tensors), len(dataset))


def require_keyed(dataset: Any, where: str) -> None:
    """Raises UserError for a data set without `__getitems__(keys)` or `__len__`. where: its name in messages."""
    if isinstance(dataset, IterableDataset):
        raise UserError(_iterable(where))
    if not is_keyed(dataset):
        name, found = "dataset", "has no `__getitems__(keys)`"
        if isinstance(dataset, DataLoader):
            name, found = "loader.dataset", "makes its own batches, but the trainer must build them"
        raise UserError(
            f"{where}: {type(dataset).__name__} {found}; return trainer.from_dataset({name}, seed=self.seed) instead"
        )
    if not hasattr(dataset, "__len__"):
        raise UserError(f"{where}: {type(dataset).__name__} has no `__len__`; define it")
    _require_whole_length(dataset, where)


def _require_whole_length(dataset: Any, where: str) -> None:
    length = type(dataset).__len__(dataset)
    if not hasattr(length, "__index__"):
        raise UserError(f"{where}: `__len__` of {type(dataset).__name__} returns {length!r}; return a whole number")


def is_keyed(dataset: Any) -> bool:
    """Returns whether a data set has the method `__getitems__(keys)` for `SampleKeys`."""
    return hasattr(type(dataset), "__getitems__") and not _takes_lists(dataset)


def _takes_lists(dataset: Any) -> bool:
    """Returns whether `__getitems__` takes a list of indices and returns a list of items, as for PyTorch's DataLoader.

    Calls `__getitems__` only if the data set also has `__getitem__`, as data sets for a DataLoader do.
    """
    if not hasattr(type(dataset), "__getitem__"):
        return False
    with draws_put_back():
        try:
            items = dataset.__getitems__([0])
        except Exception:  # a data set that expects keys may raise anything for a list
            return False
    return isinstance(items, list) and len(items) == 1


def _iterable(where: str) -> str:
    return (
        f"{where}: an IterableDataset has no sample indices; use trainer.from_stream(lambda: iter(dataset), "
        "samples_per_epoch=..., seed=...) instead"
    )


@dataclass(eq=False)
class KeyedItems:
    """Base class of data sets that collate items into dictionaries. source: the name of the data in messages."""

    source: str
    collate: Callable[[list[Any]], Any]
    seed: int
    names: Sequence[str] | None

    def _collated(self, items: list[Any]) -> Any:
        if self.collate is not default_collate:
            return self.collate(items)
        try:
            return default_collate(items)
        except (KeyError, RuntimeError, TypeError) as error:
            raise UserError(
                f"{self.source}: its items cannot be stacked into a batch ({error}); "
                "pass `collate`, a function that makes a batch from a list of items"
            ) from None

    def named(self, batch: Any) -> dict[str, Any]:
        """Returns the parts of a batch by name. Raises UserError if names are missing, or given although not needed."""
        where = f"{self.source.removesuffix(')')}, names={self.names})"
        own_names = batch if isinstance(batch, Mapping) else getattr(batch, "_fields", None)
        if own_names is not None and self.names is not None:
            raise UserError(f"{where}: its items have names already ({', '.join(map(str, own_names))}); omit `names`")
        if isinstance(batch, Mapping):
            return dict(batch)
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        names = self.names or own_names or ()
        if len(names) != len(parts) or len(set(names)) < len(names):
            raise UserError(
                f'{where}: its items have {len(parts)} value(s); give each its own name, as in names=("image", "label")'
            )
        return dict(zip(names, parts, strict=True))


@dataclass(eq=False)
class _DatasetItems(KeyedItems):
    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Any]:
        words = random_bits(self.seed, keys.epoch, keys.index, 3).tolist()
        items = []
        with draws_put_back():
            for index, seeds in zip(keys.index.tolist(), words, strict=True):
                seed_draws(*seeds)
                items.append(self.dataset[index])
            return self.named(self._collated(items))


class _KeyedTensors(Movable):
    """Data set that `from_dataset` returns for tensors; indexing gives the same batch as collating single items."""

    of_tensors, rows_alike, stays = True, True, frozenset({"_weight"})

    def __init__(self, tensors: Mapping[str, Tensor], num_rows: int) -> None:
        self._tensors, self._weight, self._num_rows = dict(tensors), tensors.get("weight"), num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitems__(self, keys: SampleKeys) -> dict[str, Tensor]:
        index = self.here(keys.index)
        return {name: tensor[index] for name, tensor in self._tensors.items()}

    def weights(self, keys: SampleKeys) -> np.ndarray | None:
        return None if self._weight is None else self._weight[torch.from_numpy(keys.index)].numpy()


def _of_arrays(arrays: Mapping[str, Any]) -> _KeyedTensors:
    """Makes a data set from a dictionary of arrays. Raises UserError for values that are not arrays of equal length."""
    tensors = {}
    for name, array in arrays.items():
        if isinstance(array, Dataset):
            raise UserError(f"from_dataset: {name!r} is a data set, not an array; several data sets need a task")
        try:
            tensors[name] = torch.as_tensor(array)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            account = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(
                f"from_dataset: torch cannot convert {name!r} to a tensor ({account}); pass a NumPy array of numbers"
            ) from None
    lengths = {tensor.shape[:1] for tensor in tensors.values()}
    if len(lengths) != 1 or () in lengths:
        found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise UserError(
            f"from_dataset: all values of a dictionary must be arrays of equal length; found {found or 'nothing'}"
        )
    return _KeyedTensors(tensors, lengths.pop()[0])


def _tensors_of(dataset: Any) -> tuple[Tensor, ...] | None:
    """Returns a TensorDataset's tensors, or copies of the rows that its Subset selects; None for other data sets."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    whole = _tensors_of(dataset.dataset) if type(dataset) is Subset else None
    return None if whole is None else tuple(tensor[torch.as_tensor(dataset.indices)] for tensor in whole)


def seed_draws(for_random: int, for_numpy: int, for_torch: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's default host generators. Each argument: 64 random bits."""
    random.seed(for_random)
    np.random.seed(for_numpy >> 32)  # an integer seed has at most 32 bits; an array would be five times slower
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would seed every device, in 130 us


@contextmanager
def draws_put_back() -> Iterator[None]:
    """Context that restores the states of `random`, `numpy.random` and PyTorch's default generator on exit."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
