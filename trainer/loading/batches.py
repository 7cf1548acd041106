"""From sample keys to batches, in order, in this process or in worker processes."""

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.common.errors import UserError
from trainer.common.torch_private import has_workers, kill_workers
from trainer.loading.order import SampleKeys

Batch = dict[str, Tensor]

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""
# Found before any fork: a child that loads a library waits for ever if another thread was loading one at that moment.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


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
        self._datasets = datasets

    def __len__(self) -> int:
        return len(self._datasets[0])

    def __getitems__(self, keys: SampleKeys) -> Any:
        return self._datasets[keys.phase].__getitems__(keys)


def gathered(dataset: KeyedDataset, collate: Collate, keys: SampleKeys) -> Batch:
    """The batch of a data set that keys name, in this process."""
    batch = collate(dataset.__getitems__(keys), keys)
    if keys.placeholder:
        batch["weight"] = torch.zeros_like(batch["weight"])
    return batch


Request = tuple[int, SampleKeys]
"""What travels to a worker: the data set that is meant, by its number, and one key. One batch travels back."""


class _NumberedBatches(Dataset[Batch | UserError]):
    """The batches of several data sets as items of one, in a worker.

    A refusal is an item too: torch would send an exception on as one of its traceback. Whatever else is raised in a
    worker comes as an Exception, since of a SystemExit torch would only say that the worker has ended.
    """

    def __init__(self) -> None:
        self.sources: list[tuple[KeyedDataset, Collate]] = []

    def __getitem__(self, request: Request) -> Batch | UserError:
        number, keys = request
        try:
            return gathered(*self.sources[number], keys)
        except UserError as refusal:
            return refusal
        except Exception:
            raise
        except BaseException as error:
            raise RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


class Workers:
    """Who gathers the batches of one `BatchLoader`, or of several of which one is iterated over at a time.

    num_workers: 0 gathers in this process, which is fastest for what is only gathered from memory; otherwise this
        number of processes, which start when they are first needed.
    for_gpu: batches are put into page-locked memory, so that copies to a GPU do not wait, and have few lengths; see
        `SampleKeys.padded_length`.
    """

    def __init__(self, num_workers: int = 0, for_gpu: bool = False) -> None:
        self._for_gpu = for_gpu
        self._batches = _NumberedBatches()
        self._requests: Iterable[Request] = ()
        self._processes: DataLoader[Batch | UserError] | None = None
        if num_workers > 0:
            self._processes = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self,
                num_workers=num_workers,
                pin_memory=for_gpu,
                persistent_workers=True,
                worker_init_fn=_depend_on_the_trainer,
                # A forked worker starts at once and shares the data; a spawned one imports torch and copies it.
                multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
                # A generator of its own: making an iterator draws from it, and must not disturb the global one.
                generator=torch.Generator(),
            )

    def __iter__(self) -> Iterator[Request]:
        """What was last asked for: the processes outlive that, and ask again."""
        return iter(self._requests)

    def add(self, dataset: KeyedDataset, collate: Collate) -> int:
        """The number by which requests mean one more data set."""
        running = self._processes is not None and has_workers(self._processes)
        assert not running, "workers that run already know nothing of it"
        self._batches.sources.append((dataset, collate))
        return len(self._batches.sources) - 1

    def load(self, number: int, keys: Iterable[SampleKeys]) -> Iterator[Batch]:
        """The batches that keys name of one data set, in order. What an earlier call has not yielded yet is lost."""
        keys = map(self.completed, keys) if self._for_gpu else keys
        if self._processes is None:
            batches = (gathered(*self._batches.sources[number], key) for key in keys)
            if not self._for_gpu:
                return batches
            return ({name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches)
        self._requests = ((number, key) for key in keys)
        others = set(multiprocessing.active_children())
        try:
            return map(_or_raise, self._processes)
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:  # `close` would not know of them
                worker.kill()
            raise

    def completed(self, keys: SampleKeys) -> SampleKeys:
        """The keys, with what depends on the device."""
        return replace(keys, few_lengths=True) if self._for_gpu else keys

    def close(self) -> None:
        """Ends the processes, also those that hang. Otherwise the interpreter would wait for ever: it asks by SIGTERM.

        It may be called again.
        """
        if self._processes is not None:
            kill_workers(self._processes)


class BatchLoader:
    """Yields the batches of a data set that keys name. workers: by default this process gathers them."""

    def __init__(self, dataset: KeyedDataset, collate: Collate, workers: Workers | None = None) -> None:
        self._dataset, self._collate, self._workers = dataset, collate, workers or Workers()
        self._number = self._workers.add(dataset, collate)

    def __call__(self, keys: Iterable[SampleKeys]) -> Iterator[Batch]:
        return self._workers.load(self._number, keys)

    def one(self, keys: SampleKeys) -> Batch:
        """A single batch, gathered in this process: there is nothing to do for workers meanwhile."""
        return gathered(self._dataset, self._collate, self._workers.completed(keys))

    def close(self) -> None:
        """Ends its workers; see `Workers.close`."""
        self._workers.close()


def _or_raise(batch: Batch | UserError) -> Batch:
    if isinstance(batch, UserError):
        raise batch
    return batch


def _depend_on_the_trainer(worker_id: int) -> None:
    # A terminal sends Ctrl-C to the whole process group; the trainer decides when its workers end.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    # However it ends: torch's own watch for that looks only between two batches, every five seconds. A forked worker
    # holds the trainer's connections too; while it lives, no other rank would notice that the trainer was killed.
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A batch that cannot be sent, for want of descriptors or by too long a TMPDIR, would be missed for ever.
    Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined]


def _end(error: Exception, batch: object) -> None:
    """The trainer notices that this worker is gone."""
    traceback.print_exception(error)
    os._exit(1)
