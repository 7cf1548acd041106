"""Makes batches, in this process or ahead of time in worker processes."""

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
from trainer.loading.batches import Batch, Collate, KeyedDataset, gathered
from trainer.loading.order import SampleKeys
from trainer.loading.trial import UNKNOWN, Trial, outline

PR_SET_PDEATHSIG = 1
"""Option of prctl(2) that sets the signal for a process whose parent exits."""
# Loaded before any fork, because a child deadlocks if another thread is loading a library during the fork.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
SHARED_MEMORY = "/dev/shm"
CAN_FORK = "fork" in multiprocessing.get_all_start_methods()

Request = tuple[int, SampleKeys]
"""Request to a worker for one batch: the number of the loader, and sample keys."""


def shared_memory() -> float:
    """Returns half of the free shared memory in bytes, the limit for batches from workers."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free / 2
    except OSError:  # this system has no /dev/shm
        return math.inf


class _NumberedBatches(Dataset[Batch | UserError]):
    """Dataset whose items are the batches of several loaders, for PyTorch's DataLoader.

    Returns a UserError as an item, because the DataLoader would add a traceback to its text.
    Converts SystemExit to RuntimeError, because the DataLoader would only report that the worker exited.
    """

    def __init__(self) -> None:
        self.sources: list[tuple[Sequence[KeyedDataset], Collate]] = []

    def __getitem__(self, request: Request) -> Batch | UserError:
        number, keys = request
        try:
            return self.gathered(number, keys)
        except UserError as refusal:
            return refusal
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error

    def gathered(self, number: int, keys: SampleKeys) -> Batch:
        datasets, collate = self.sources[number]
        return gathered(datasets[keys.phase], collate, keys)


class Workers:
    """Makes batches for loaders.

    num_workers: number of worker processes, started on first use or by `start`; with 0, this process makes batches.
    for_gpu: whether to pin batches and pad them to a few fixed lengths (see `SampleKeys.padded_length`). on_trial:
    whether this process makes the first training batches, and times them. Workers then take over if they save time, the
    data has not changed, and batches fit into `room` bytes of shared memory; otherwise the workers are ended.
    """

    def __init__(
        self, num_workers: int = 0, for_gpu: bool = False, on_trial: bool = False, room: float = math.inf
    ) -> None:
        self.num_workers, self.on_trial, self._room = num_workers, on_trial, room
        self._for_gpu, self._trial, self._is_auto = for_gpu, Trial(), on_trial
        self._remarks: list[str] = []
        self._batches = _NumberedBatches()
        self._arriving: Iterator[Batch | UserError] = iter(())
        # weak references: the code that reads a stream owns it
        self._streams: list[ref[BatchStream]] = []  # streams with requests left; the last stream has priority
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
                # forked workers start at once and share data; spawned workers import torch and copy data
                multiprocessing_context="fork" if CAN_FORK else None,
                # a separate generator, because creating an iterator draws a random number
                generator=torch.Generator(),
            )

    def add(self, datasets: Sequence[KeyedDataset], collate: Collate) -> int:
        """Registers a loader's data sets, by phase, and collate function; returns the loader's number for requests."""
        running = self._processes is not None and has_workers(self._processes)
        assert not running, "running workers would not see the new data set"
        self._batches.sources.append((datasets, collate))
        return len(self._batches.sources) - 1

    def start(self) -> None:
        """Starts workers. Call this method before the process initialises CUDA, which does not survive a fork."""
        if self._processes is None:
            return
        if CAN_FORK and torch.cuda.is_initialized():
            self._end("this process already uses CUDA, so it cannot fork workers")
            return
        self._prime()

    def load(self, number: int, keys: Iterable[SampleKeys], trains: bool, ahead: bool) -> Iterator[Batch]:
        """Returns an iterator over batches of a loader, in the order of keys.

        number: result of `add`. trains: whether the batches are for training; a trial measures only training batches.
        ahead: whether only idle workers may make the batches.
        """
        keys = map(self.completed, keys) if self._for_gpu else keys
        if self._processes is None:
            return (self._made(number, key) for key in keys)
        stream = BatchStream(self, ((number, key) for key in keys), trains)
        self._streams.insert(0 if ahead else len(self._streams), ref(stream))
        self._trial.last = None
        is_busy = len(self._asked) >= (1 if ahead else self.num_workers)  # each worker has up to two requests
        if self._may_ask() and not is_busy:
            self._prime()
        return stream

    def one(self, number: int, keys: SampleKeys) -> Batch:
        """Makes a single batch of a loader in this process."""
        return self._batches.gathered(number, self.completed(keys))

    def next_of(self, stream: "BatchStream") -> Batch:
        """Returns a stream's next batch. Raises StopIteration at the end, or the error that making the batch raised."""
        own = ref(stream)
        while not stream.arrived and own in self._asked:
            self._receive()
        if stream.arrived:
            batch = stream.arrived.popleft()
            if isinstance(batch, Exception):
                raise batch
            return batch
        if self._processes is not None and not self.on_trial and own in self._streams:  # other streams had priority
            self._streams.remove(own)
            self._streams.append(own)
            self._prime()
            return self.next_of(stream)
        (number, key), start = next(stream.requests), time.perf_counter()
        batch = self._made(number, key)
        if not stream.trains:
            self._trial.last = None
        elif self.on_trial and self._trial.add(start, time.perf_counter()):
            self._decide(sum(tensor.numel() * tensor.element_size() for tensor in batch.values()))
        return batch

    def _made(self, number: int, keys: SampleKeys) -> Batch:
        batch = self._batches.gathered(number, keys)
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self._for_gpu else batch

    def take_remarks(self) -> Sequence[str]:
        """Returns messages for the user that are new since the last call."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def completed(self, keys: SampleKeys) -> SampleKeys:
        """Returns sample keys with `few_lengths` set if batches are for a GPU."""
        return replace(keys, few_lengths=True) if self._for_gpu else keys

    def end(self) -> None:
        """Ends workers after the pending batches; from then on this process makes batches."""
        while self._asked:
            self._receive()
        self.close()
        self._processes, self.num_workers, self.on_trial = None, 0, False

    def close(self) -> None:
        """Kills workers, because the interpreter's exit would wait forever for a worker that hangs."""
        if self._processes is not None:
            kill_workers(self._processes)

    # --- the processes -----------------------------------------------------------------------------------------------

    def __iter__(self) -> "Workers":
        return self

    def __next__(self) -> Request:
        """Returns the next request for workers, whose DataLoader uses `Workers` as its sampler."""
        while self._streams and not self.on_trial:
            stream = self._streams[-1]()
            request = next(stream.requests, None) if stream is not None else None
            if request is not None:
                self._asked.append(self._streams[-1])
                return request
            self._streams.pop()
        raise StopIteration

    def _prime(self) -> None:
        """Sends the current requests to workers, after all pending batches have arrived."""
        assert self._processes is not None
        while self._asked:
            self._receive()
        others = set(multiprocessing.active_children())
        if self._at_start is None:  # the workers start now
            self._at_start = self._outline()
        try:
            self._arriving = iter(self._processes)
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:  # workers that `close` does not know
                worker.kill()
            raise

    def _receive(self) -> None:
        stream = self._asked.popleft()()
        try:
            batch: Batch | Exception = next(self._arriving)
        except Exception as error:  # `next_of` raises it in place of the batch
            batch = error
        if stream is not None:
            stream.arrived.append(batch)

    def _decide(self, batch_bytes: int) -> None:
        self.on_trial = False
        saves_time, times = self._trial.outcome()
        if not saves_time:
            self._end(times)
        elif 2 * self.num_workers * batch_bytes > self._room:
            self._end(f"two batches per worker would not fit into {SHARED_MEMORY}")
        elif self._may_ask():
            self._remarks.append(f"Workers: {times}, so {self.num_workers} process(es) load batches from now on.")
            self._prime()

    def _may_ask(self) -> bool:
        """Returns whether workers make batches; ends workers of `--num-workers auto` if data may have changed."""
        if self._processes is None or self.on_trial:
            return False
        if not self._at_start:  # no worker runs yet, or a change was reported
            return True
        now, before = self._outline(), self._at_start
        changed = next((name for name in [*now, *before] if now.get(name) != before.get(name)), None)
        unknown = next((name for name, held in now.items() if held == UNKNOWN), None)
        if not self._is_auto:
            if changed is not None:
                self._at_start = {}  # reports a change only once
                advice = "if batches depend on it, set --num-workers 0"
                self._remarks.append(f"Workers: {changed} changed, but workers see the old value; {advice}.")
        elif changed is not None:
            self._end(f"{changed} changes, which worker processes would not see")
        elif unknown is not None:
            self._end(f"worker processes may be unable to share {unknown}")
        return self._processes is not None

    def _outline(self) -> dict[str, Any]:
        """Returns digests of the attributes of all data sets, and of tasks whose `collate` makes batches."""
        roots: dict[int, Any] = {}
        for datasets, collate in self._batches.sources:
            roots |= {id(part): part for part in (*datasets, getattr(collate, "__self__", None))}
        return outline(roots.values())

    def _end(self, reason: str) -> None:
        self._remarks.append(f"Workers: none; the training process loads batches, because {reason}.")
        self.end()


class BatchStream(Iterator[Batch]):
    """Iterator over the batches of one call of `Workers.load`.

    requests: those not yet sent to workers. arrived: received batches, or errors in place of batches.
    """

    def __init__(self, workers: Workers, requests: Iterator[Request], trains: bool) -> None:
        self._workers, self.requests, self.trains = workers, requests, trains
        self.arrived: deque[Batch | Exception] = deque()

    def __next__(self) -> Batch:
        return self._workers.next_of(self)


class BatchLoader:
    """Loads batches. workers: object that makes the batches; by default this process does."""

    def __init__(
        self, datasets: Sequence[KeyedDataset], collate: Collate, workers: Workers | None = None, trains: bool = False
    ) -> None:
        """datasets: the data sets of all phases, or the data set of an evaluation."""
        self._workers, self._trains = workers or Workers(), trains
        self._number = self._workers.add(datasets, collate)

    def __call__(self, keys: Iterable[SampleKeys], ahead: bool = False) -> Iterator[Batch]:
        """Returns an iterator over batches. ahead: whether only idle workers may make batches."""
        return self._workers.load(self._number, keys, self._trains, ahead)

    def one(self, keys: SampleKeys) -> Batch:
        return self._workers.one(self._number, keys)

    def close(self) -> None:
        self._workers.close()


def _depend_on_the_trainer(worker_id: int) -> None:
    # A terminal sends Ctrl-C to the whole process group, but only the trainer decides when workers end.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    # PyTorch checks for a dead parent only every five seconds, between batches. A forked worker holds the trainer's
    # connections, so until it exits no other rank notices that the trainer was killed.
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Queue._on_queue_feeder_error = staticmethod(_leave)  # type: ignore[attr-defined]


def _leave(error: Exception, batch: object) -> None:
    """Ends a worker that cannot send a batch, for example if file descriptors run out; the trainer notices the exit."""
    traceback.print_exception(error)
    os._exit(1)
