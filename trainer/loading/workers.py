"""Makes batches in this process, or ahead of time in worker processes."""

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
"""prctl(2): signal for a process whose parent exits."""
# Loaded before any fork: a child would deadlock if another thread was loading a library at the fork.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
SHARED_MEMORY = "/dev/shm"
CAN_FORK = "fork" in multiprocessing.get_all_start_methods()

Request = tuple[int, SampleKeys]
"""(data set, keys): a request to a worker, answered by one batch."""


def shared_memory() -> float:
    """Returns half of the free shared memory in bytes, for batches from workers; containers may have little."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free / 2
    except OSError:  # located elsewhere on this system
        return math.inf


class _NumberedBatches(Dataset[Batch | UserError]):
    """Batches of several data sets as one dataset, in a worker.

    Returns a UserError as an item, because torch would rewrite its text with a traceback; raises SystemExit as
    RuntimeError, because torch would only report that the worker exited.
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
    """Makes the batches of loaders, in this process or in workers.

    num_workers: processes, started on first use or by `start`; 0: this process makes batches. for_gpu: pin batches, and
    pad to few lengths; see `SampleKeys.padded_length`. on_trial: this process makes the first training batches; then
    workers take over if that saves time, if they can share the data, and if batches in flight fit in `room` bytes of
    shared memory; otherwise they are ended.
    """

    def __init__(
        self, num_workers: int = 0, for_gpu: bool = False, on_trial: bool = False, room: float = math.inf
    ) -> None:
        self.num_workers, self.on_trial, self._room = num_workers, on_trial, room
        self._for_gpu, self._trial, self._is_auto = for_gpu, Trial(), on_trial
        self._remarks: list[str] = []
        self._batches = _NumberedBatches()
        self._arriving: Iterator[Batch | UserError] = iter(())
        # weak, since readers own their streams
        self._streams: list[ref[BatchStream]] = []  # with requests left; the last one has priority
        self._asked: deque[ref[BatchStream]] = deque()  # one entry per batch in flight
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
                # forked workers start at once and share data; spawned ones import torch and copy it
                multiprocessing_context="fork" if CAN_FORK else None,
                # its own, since creating an iterator draws from it
                generator=torch.Generator(),
            )

    def add(self, dataset: KeyedDataset, collate: Collate) -> int:
        """Registers a data set; returns its number for requests."""
        running = self._processes is not None and has_workers(self._processes)
        assert not running, "running workers would not see it"
        self._batches.sources.append((dataset, collate))
        return len(self._batches.sources) - 1

    def start(self) -> None:
        """Starts workers now, before this process uses CUDA, after which a fork could break."""
        if self._processes is None:
            return
        if CAN_FORK and torch.cuda.is_initialized():
            self._end("it uses CUDA already, so it cannot fork workers")
            return
        self._at_start = self._outline()
        self._prime()

    def load(self, number: int, keys: Iterable[SampleKeys], trains: bool, ahead: bool) -> Iterator[Batch]:
        """Yields the batches of some keys of a data set, in order.

        trains: count them in a trial. ahead: let only idle workers start on them.
        """
        keys = map(self.completed, keys) if self._for_gpu else keys
        if self._processes is None:
            return (self._made(number, key) for key in keys)
        stream = BatchStream(self, ((number, key) for key in keys), trains)
        self._streams.insert(0 if ahead else len(self._streams), ref(stream))
        self._trial.last = None
        is_busy = len(self._asked) >= (1 if ahead else self.num_workers)  # up to two batches each
        if self._may_ask() and not is_busy:
            self._prime()
        return stream

    def next_of(self, stream: "BatchStream") -> Batch:
        """Returns a stream's next batch. Raises StopIteration at the end, or the error of making it."""
        own = ref(stream)
        while not stream.arrived and own in self._asked:
            self._receive()
        if stream.arrived:
            batch = stream.arrived.popleft()
            if isinstance(batch, Exception):
                raise batch
            return batch
        if self._processes is not None and not self.on_trial and own in self._streams:  # others had priority
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
        """Returns new lines for the user."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def completed(self, keys: SampleKeys) -> SampleKeys:
        """Completes keys with settings for the device."""
        return replace(keys, few_lengths=True) if self._for_gpu else keys

    def end(self) -> None:
        """Ends workers after pending batches; this process makes the rest."""
        while self._asked:
            self._receive()
        self.close()
        self._processes, self.num_workers, self.on_trial = None, 0, False

    def close(self) -> None:
        """Kills workers, even hanging ones, for which interpreter exit would wait forever."""
        if self._processes is not None:
            kill_workers(self._processes)

    # --- the processes -----------------------------------------------------------------------------------------------

    def __iter__(self) -> "Workers":
        return self

    def __next__(self) -> Request:
        """Returns the next request to workers; this object is their DataLoader's sampler."""
        while self._streams and not self.on_trial:
            stream = self._streams[-1]()
            request = next(stream.requests, None) if stream is not None else None
            if request is not None:
                self._asked.append(self._streams[-1])
                return request
            self._streams.pop()
        raise StopIteration

    def _prime(self) -> None:
        """Restarts workers on the current requests, once pending batches have arrived."""
        assert self._processes is not None
        while self._asked:
            self._receive()
        others = set(multiprocessing.active_children())
        try:
            self._arriving = iter(self._processes)
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:  # unknown to `close`
                worker.kill()
            raise

    def _receive(self) -> None:
        stream = self._asked.popleft()()
        try:
            batch: Batch | Exception = next(self._arriving)
        except Exception as error:  # raised when its turn comes
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
        """Returns whether workers make batches; automatic ones are ended if they cannot share the data."""
        if self._processes is None or self.on_trial:
            return False
        if self._at_start is None:
            return True
        now, before = self._outline(), self._at_start
        changed = next((name for name in [*now, *before] if now.get(name) != before.get(name)), None)
        unknown = next((name for name, held in now.items() if held == UNKNOWN), None)
        if not self._is_auto:
            self._at_start = None  # reported once
            if changed is not None:
                self._remarks.append(f"Workers: {changed} changed after they started, which they do not see.")
        elif changed is not None:
            self._end(f"{changed} changes, which other processes would not see")
        elif unknown is not None:
            self._end(f"processes may be unable to share {unknown}")
        return self._processes is not None

    def _outline(self) -> dict[str, Any]:
        """Outlines the data sets, and the tasks whose collate makes batches."""
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

    requests: not sent to workers yet. arrived: received batches, and errors in their place.
    """

    def __init__(self, workers: Workers, requests: Iterator[Request], trains: bool) -> None:
        self._workers, self.requests, self.trains = workers, requests, trains
        self.arrived: deque[Batch | Exception] = deque()

    def __next__(self) -> Batch:
        return self._workers.next_of(self)


class BatchLoader:
    """Yields the batches of a data set by keys. workers: default: this process."""

    def __init__(
        self, dataset: KeyedDataset, collate: Collate, workers: Workers | None = None, trains: bool = False
    ) -> None:
        self._dataset, self._collate, self._workers, self._trains = dataset, collate, workers or Workers(), trains
        self._number = self._workers.add(dataset, collate)

    def __call__(self, keys: Iterable[SampleKeys], ahead: bool = False) -> Iterator[Batch]:
        """ahead: wanted later, so only idle workers start on them."""
        return self._workers.load(self._number, keys, self._trains, ahead)

    def one(self, keys: SampleKeys) -> Batch:
        """Gathers a single batch in this process."""
        return gathered(self._dataset, self._collate, self._workers.completed(keys))

    def close(self) -> None:
        self._workers.close()


def _depend_on_the_trainer(worker_id: int) -> None:
    # A terminal sends Ctrl-C to the whole process group; the trainer decides when workers end.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    # torch checks only every five seconds, between batches. A forked worker holds the trainer's connections, so until
    # it exits no other rank notices that the trainer was killed.
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Queue._on_queue_feeder_error = staticmethod(_leave)  # type: ignore[attr-defined]


def _leave(error: Exception, batch: object) -> None:
    """Ends a worker that cannot send a batch (no file descriptors, TMPDIR too long), which the trainer notices."""
    traceback.print_exception(error)
    os._exit(1)
