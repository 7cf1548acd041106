"""From sample keys to batches, in order, in this process or in worker processes."""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.loading.order import SampleKeys

Batch = dict[str, Tensor]

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""


class KeyedDataset(Protocol):
    """A data set that gathers a whole batch at once."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: SampleKeys) -> Any: ...


Collate = Callable[[Any, SampleKeys], Batch]


class PhaseDatasets:
    """The data set of each phase as one, so that one set of workers loads all of them."""

    def __init__(self, datasets: Sequence[KeyedDataset]) -> None:
        self._datasets = datasets

    def __len__(self) -> int:
        return len(self._datasets[0])

    def __getitems__(self, keys: SampleKeys) -> Any:
        return self._datasets[keys.phase].__getitems__(keys)


class _Batches(Dataset[Batch]):
    """A data set whose items are whole batches, so that one key travels to a worker and one batch back."""

    def __init__(self, dataset: KeyedDataset, collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, keys: SampleKeys) -> Batch:
        batch = self.collate(self.dataset.__getitems__(keys), keys)
        if keys.placeholder:
            batch["weight"] = torch.zeros_like(batch["weight"])
        return batch


class _KeySource:
    """A sampler that yields whatever keys it was last given, so that workers outlive an epoch."""

    keys: Iterable[SampleKeys] = ()

    def __iter__(self) -> Iterator[SampleKeys]:
        return iter(self.keys)


class BatchLoader:
    """Yields the batches named by the keys.

    num_workers: 0 gathers in this process, which is fastest for data that lies in memory.
    pin_memory: put batches into page-locked memory, so that copies to a GPU do not wait.
    """

    def __init__(self, dataset: KeyedDataset, collate: Collate, num_workers: int = 0, pin_memory: bool = False) -> None:
        self._batches = _Batches(dataset, collate)
        self._pin_memory = pin_memory
        self._source = _KeySource()
        self._workers: DataLoader[Batch] | None = None
        if num_workers > 0:
            self._workers = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._source,
                num_workers=num_workers,
                pin_memory=pin_memory,
                persistent_workers=True,
                worker_init_fn=_depend_on_the_trainer,
                # A forked worker starts at once and shares the data; a spawned one imports torch and copies it.
                multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
                # A generator of its own: making an iterator draws from it, and must not disturb the global one.
                generator=torch.Generator(),
            )

    def __call__(self, keys: Iterable[SampleKeys]) -> Iterator[Batch]:
        if self._workers is None:
            batches = (self._batches[key] for key in keys)
            if not self._pin_memory:
                return batches
            return ({name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches)
        self._source.keys = keys
        others = set(multiprocessing.active_children())
        try:
            return iter(self._workers)
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:  # `close` would not know of them
                worker.kill()
            raise

    def close(self) -> None:
        """Ends the workers, also those that hang. Otherwise the interpreter would wait for ever: it asks by SIGTERM."""
        iterator = self._workers._iterator if self._workers is not None else None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            for process in iterator._workers:  # type: ignore[attr-defined]
                process.kill()


def _depend_on_the_trainer(worker_id: int) -> None:
    # A terminal sends Ctrl-C to the whole process group; the trainer decides when its workers end.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    # However it ends: torch's own watch for that looks only between two batches, every five seconds. A forked worker
    # holds the trainer's connections too; while it lives, no other rank would notice that the trainer was killed.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
