"""Who makes batches: this process, or worker processes that are asked for them ahead of their use."""

import ctypes
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.queues import Queue
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.common.errors import UserError
from trainer.common.torch_private import has_workers, kill_workers
from trainer.loading.batches import Batch, Collate, KeyedDataset, PhaseDatasets, gathered
from trainer.loading.order import SampleKeys
from trainer.loading.trial import UNKNOWN, Trial, outline

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""
# Found before any fork: a child that loads a library waits for ever if another thread was loading one at that moment.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
SHARED_MEMORY = "/dev/shm"
CAN_FORK = "fork" in multiprocessing.get_all_start_methods()

Request = tuple[int, SampleKeys]
"""The number of a data set, and the keys of a batch of it: what travels to a worker. One batch travels back."""


def shared_memory() -> float:
    """Half of the bytes that are free for batches on their way from workers; a container may have very few."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free / 2
    except OSError:  # as on systems that have it elsewhere
        return math.inf


class _NumberedBatches(Dataset[Batch | UserError]):
    """The batches of several data sets as items of one, in a worker.

    A UserError is an item too: torch would send an exception on as one of its traceback. A SystemExit is raised as a
    RuntimeError, since torch would only say that the worker has ended.
    """

    def __init__(self) -> None:
        self.sources: list[tuple[KeyedDataset, Collate]] = []

    def __getitem__(self, request: Request) -> Batch | UserError:
        number, keys = request
        try:
            return gathered(*self.sources[number], keys)
        except UserError as refusal:
            return refusal
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


class Workers:
    """Makes the batches of loaders, in this process or in worker processes.

    num_workers: processes, which start when they are first needed, or by `start`; with 0 this process makes batches.
    for_gpu: batches lie in pinned memory and have few lengths; see `SampleKeys.padded_length`.
    on_trial: this process makes the first batches of training. Then the processes do if that saves time, if they may
        have the data, and if what is on its way from them takes `room` bytes of shared memory at most; or they end.
    """

    def __init__(
        self, num_workers: int = 0, for_gpu: bool = False, on_trial: bool = False, room: float = math.inf
    ) -> None:
        self.num_workers, self.on_trial, self._room = num_workers, on_trial, room
        self._for_gpu, self._trial, self._is_auto = for_gpu, Trial(), on_trial
        self._remarks: list[str] = []
        self._batches = _NumberedBatches()
        self._arriving: Iterator[Batch | UserError] = iter(())
        # Streams are those of their readers, and gone with them.
        self._streams: list[ref[BatchStream]] = []  # with requests left; those of the last one come first
        self._asked: deque[ref[BatchStream]] = deque()  # one entry for each batch that is on its way
        self._at_start: dict[str, Any] | None = None
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
                multiprocessing_context="fork" if CAN_FORK else None,
                # A generator of its own: making an iterator draws from it, and must not disturb the global one.
                generator=torch.Generator(),
            )

    def add(self, dataset: KeyedDataset, collate: Collate) -> int:
        """Returns the number of one more data set, for requests."""
        running = self._processes is not None and has_workers(self._processes)
        assert not running, "workers that run already know nothing of it"
        self._batches.sources.append((dataset, collate))
        return len(self._batches.sources) - 1

    def start(self) -> None:
        """Starts the processes now, before this one uses CUDA: a fork of one that does could break it."""
        if self._processes is None:
            return
        if CAN_FORK and torch.cuda.is_initialized():
            self._end("it uses CUDA already, after which none may be forked")
            return
        self._at_start = self._outline()
        self._prime()

    def load(self, number: int, keys: Iterable[SampleKeys], trains: bool, ahead: bool) -> Iterator[Batch]:
        """The batches of a data set that keys name, in order.

        trains: whether they count in a trial. ahead: processes begin with them only when they have nothing else to do.
        """
        keys = map(self.completed, keys) if self._for_gpu else keys
        if self._processes is None:
            return (self._made(number, key) for key in keys)
        stream = BatchStream(self, ((number, key) for key in keys), trains)
        self._streams.insert(0 if ahead else len(self._streams), ref(stream))
        self._trial.last = None
        is_busy = len(self._asked) >= (1 if ahead else self.num_workers)  # of up to two each
        if self._may_ask() and not is_busy:
            self._prime()
        return stream

    def next_of(self, stream: "BatchStream") -> Batch:
        """The next batch of a stream. Raises StopIteration after the last one, and what making it raised."""
        own = ref(stream)
        while not stream.arrived and own in self._asked:
            self._receive()
        if stream.arrived:
            batch = stream.arrived.popleft()
            if isinstance(batch, Exception):
                raise batch
            return batch
        if self._processes is not None and not self.on_trial and own in self._streams:  # others came before it
            self._streams.remove(own)
            self._streams.append(own)
            self._prime()
            return self.next_of(stream)
        (number, key), start = next(stream.requests), time.perf_counter()
        batch = self._made(number, key)
        if not stream.trains:
            self._trial.last = None
        elif self.on_trial and self._trial.add(start, time.perf_counter()):
            self._decide(sum(tensor.nbytes for tensor in batch.values()))
        return batch

    def _made(self, number: int, keys: SampleKeys) -> Batch:
        batch = gathered(*self._batches.sources[number], keys)
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self._for_gpu else batch

    def take_remarks(self) -> Sequence[str]:
        """New lines for the user."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def completed(self, keys: SampleKeys) -> SampleKeys:
        """The keys, with what depends on the device."""
        return replace(keys, few_lengths=True) if self._for_gpu else keys

    def end(self) -> None:
        """Ends the processes once the batches that they were asked for have come; this one makes the others."""
        while self._asked:
            self._receive()
        self.close()
        self._processes, self.num_workers, self.on_trial = None, 0, False

    def close(self) -> None:
        """Kills the processes, also those that hang, for which the interpreter would wait without end."""
        if self._processes is not None:
            kill_workers(self._processes)

    # --- the processes -----------------------------------------------------------------------------------------------

    def __iter__(self) -> "Workers":
        return self

    def __next__(self) -> Request:
        """What the processes are asked for next, as the sampler of their DataLoader."""
        while self._streams and not self.on_trial:
            stream = self._streams[-1]()
            request = next(stream.requests, None) if stream is not None else None
            if request is not None:
                self._asked.append(self._streams[-1])
                return request
            self._streams.pop()
        raise StopIteration

    def _prime(self) -> None:
        """Has the processes begin with the requests that there are, once what they were asked for has come."""
        assert self._processes is not None
        while self._asked:
            self._receive()
        others = set(multiprocessing.active_children())
        try:
            self._arriving = iter(self._processes)
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:  # `close` would not know of them
                worker.kill()
            raise

    def _receive(self) -> None:
        stream = self._asked.popleft()()
        try:
            batch: Batch | Exception = next(self._arriving)
        except Exception as error:  # for when its turn comes
            batch = error
        if stream is not None:
            stream.arrived.append(batch)

    def _decide(self, batch_bytes: int) -> None:
        self.on_trial = False
        saves_time, times = self._trial.outcome()
        if not saves_time:
            self._end(times)
        elif 2 * self.num_workers * batch_bytes > self._room:
            self._end(f"{2 * self.num_workers} of them would not fit into {SHARED_MEMORY}")
        elif self._may_ask():
            self._remarks.append(f"Workers: {times}, so {self.num_workers} process(es) make them from now on.")
            self._prime()

    def _may_ask(self) -> bool:
        """Whether processes make batches. Unless the user wants them, they end where they may not have the data."""
        if self._processes is None or self.on_trial:
            return False
        if self._at_start is None:
            return True
        now, before = self._outline(), self._at_start
        changed = next((name for name in [*now, *before] if now.get(name) != before.get(name)), None)
        unknown = next((name for name, held in now.items() if held == UNKNOWN), None)
        if not self._is_auto:
            self._at_start = None  # it is said once
            if changed is not None:
                self._remarks.append(f"Workers: {changed} has changed since they began, which they do not know.")
        elif changed is not None:
            self._end(f"{changed} changes, which other processes would not know")
        elif unknown is not None:
            self._end(f"nobody knows whether processes can share {unknown}")
        return self._processes is not None

    def _outline(self) -> dict[str, Any]:
        """The outline of the data sets, and of the tasks whose collate makes batches of them."""
        roots: dict[int, Any] = {}
        for dataset, collate in self._batches.sources:
            parts = dataset.datasets if isinstance(dataset, PhaseDatasets) else [dataset]
            roots |= {id(part): part for part in (*parts, getattr(collate, "__self__", None))}
        return outline(roots.values())

    def _end(self, reason: str) -> None:
        self._remarks.append(f"Workers: batches are made in the trainer's process: {reason}.")
        self.end()


class BatchStream(Iterator[Batch]):
    """The batches of one call of `Workers.load`.

    requests: those that processes were not asked for yet. arrived: batches to be taken, and errors in their place.
    """

    def __init__(self, workers: Workers, requests: Iterator[Request], trains: bool) -> None:
        self._workers, self.requests, self.trains = workers, requests, trains
        self.arrived: deque[Batch | Exception] = deque()

    def __next__(self) -> Batch:
        return self._workers.next_of(self)


class BatchLoader:
    """Yields the batches of a data set that keys name. workers: by default this process makes them."""

    def __init__(
        self, dataset: KeyedDataset, collate: Collate, workers: Workers | None = None, trains: bool = False
    ) -> None:
        self._dataset, self._collate, self._workers, self._trains = dataset, collate, workers or Workers(), trains
        self._number = self._workers.add(dataset, collate)

    def __call__(self, keys: Iterable[SampleKeys], ahead: bool = False) -> Iterator[Batch]:
        """ahead: they are wanted later, so workers begin when they have nothing else to do."""
        return self._workers.load(self._number, keys, self._trains, ahead)

    def one(self, keys: SampleKeys) -> Batch:
        """A single batch, gathered in this process: there is nothing to do for workers meanwhile."""
        return gathered(self._dataset, self._collate, self._workers.completed(keys))

    def close(self) -> None:
        self._workers.close()


def _depend_on_the_trainer(worker_id: int) -> None:
    # A terminal sends Ctrl-C to the whole process group; the trainer decides when its workers end.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    # torch itself looks for an ended trainer every five seconds, between batches. A forked worker holds the trainer's
    # connections: while it lives, no other rank would notice that the trainer was killed.
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Queue._on_queue_feeder_error = staticmethod(_leave)  # type: ignore[attr-defined]


def _leave(error: Exception, batch: object) -> None:
    """Ends a worker that cannot send a batch, for want of descriptors or by too long a TMPDIR: the trainer notices."""
    traceback.print_exception(error)
    os._exit(1)
