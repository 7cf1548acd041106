"""Streams of samples (`from_stream`): data without a length, read in the stream's order."""

import copy
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import default_collate

from trainer.common.errors import UserError
from trainer.common.files import plain
from trainer.loading.counter_random import random_bits
from trainer.loading.order import SampleKeys
from trainer.loading.torch_datasets import KeyedItems, draws_put_back, seed_draws

READ_AT_ONCE = 4096
"""Number of samples whose random seeds are computed together."""
STATE_EVERY_S, MOST_STATES = 1.0, 100
"""Minimum time in s between calls of a stream's `state_dict`, and the maximum number of states kept for checkpoints."""


def from_stream(
    make_iterator: Callable[..., Iterable[Any]],
    collate: Callable[[list[Any]], Any] | None = None,
    *,
    samples_per_epoch: int,
    seed: int,
    names: Sequence[str] | None = None,
) -> "KeyedStream":
    """Wraps a stream of samples, such as an IterableDataset, for `Task.splits`; samples keep the stream's order.

    Example: `from_stream(lambda epoch: read(files), samples_per_epoch=10_000, seed=self.seed, names=("x", "y"))`.

    Every process reads the whole stream and keeps the samples of its batches, so a step has the same samples on any
    number of devices. A resumed run reads the stream again from its start, unless the object that `make_iterator`
    returns has the methods `state_dict()` and `load_state_dict(state)`. Checkpoints then hold the state, which must
    consist of numbers, strings, lists and dictionaries.

    Random numbers that the stream draws for a sample from `random`, `numpy.random` and PyTorch's default generator are
    a function of (seed, epoch, number of the sample), as in `from_dataset`.

    make_iterator: returns an iterator or iterable that starts at the stream's first sample. If the function has a
        required argument, it gets the epoch, from 0, and each epoch has its own stream; otherwise all epochs read
        from one stream.
    samples_per_epoch: samples per epoch, at least 1; for a validation set, its size.
    collate, seed, names: arguments of `from_dataset`.

    Raises UserError for wrong arguments, and later if the stream ends too early.
    """
    if not callable(make_iterator):
        kind = type(make_iterator).__name__
        raise UserError(
            f"from_stream({kind}): needs a function that starts the stream, such as `lambda: iter(dataset)`"
        )
    if type(samples_per_epoch) is not int or samples_per_epoch < 1:
        raise UserError(f"from_stream: samples_per_epoch {samples_per_epoch!r}: must be a whole number, at least 1")
    source = f"from_stream({getattr(make_iterator, '__name__', type(make_iterator).__name__)})"
    return KeyedStream(source, collate or default_collate, seed, names, make_iterator, samples_per_epoch)


class Place(NamedTuple):
    """Point at which a stream can restart: an epoch, the number of samples before the point, and the stream's state."""

    epoch: int
    position: int
    state: Any


@dataclass
class _Reader:
    """An iterator over a stream, with the samples read from it.

    begun_at: number of the first sample read. position: number of the next sample. kept: samples, by number, that the
    current batch or another batch of the step may need. last: samples of the last batch. places: restart points.
    """

    epoch: int
    begun_at: int
    source: Any
    iterator: Iterator[Any]
    position: int
    process: int = field(default_factory=os.getpid)
    kept: dict[int, Any] = field(default_factory=dict)
    last: list[Any] = field(default_factory=list)
    places: deque[Place] = field(default_factory=lambda: deque(maxlen=MOST_STATES))
    asked_at: float = 0.0

    def note_place(self) -> None:
        """Records the stream's state if the stream has one and `STATE_EVERY_S` seconds have passed.

        Records no state before the first sample, because the stream may still have its state from the end of an
        earlier epoch. Raises UserError for a state of unsupported type.
        """
        is_due = self.position > self.begun_at and time.monotonic() - self.asked_at >= STATE_EVERY_S
        if not (is_due and hasattr(self.source, "state_dict") and hasattr(self.source, "load_state_dict")):
            return
        try:
            self.places.append(Place(self.epoch, self.position, plain(self.source.state_dict(), "its state_dict()")))
        except ValueError as error:
            raise UserError(f"from_stream: {error}") from None
        self.asked_at = time.monotonic()


@dataclass(eq=False)
class KeyedStream(KeyedItems):
    """Data set over a stream. Each phase has a reader that only reads forward; earlier samples require a new reader."""

    make_iterator: Callable[..., Iterable[Any]]
    num_samples: int

    # A cached property, which the check for changed data sets skips, because each worker process has its own readers.
    @cached_property
    def readers(self) -> dict[int, _Reader]:
        return {}

    @cached_property
    def begins(self) -> dict[int, Place]:
        """Restart points by phase; the stream of a phase without a restart point restarts at its first sample."""
        return {}

    def __post_init__(self) -> None:
        self._by_epoch = _takes_epoch(self.make_iterator)

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, keys: SampleKeys) -> dict[str, Any]:
        epoch, position = self._place(keys.epoch, 0)
        with draws_put_back():
            items = self._read(keys.phase, epoch, (keys.index + position).tolist(), keys.placeholder)
            return self.named(self._collated(items))

    def _place(self, epoch: int, samples: int) -> tuple[int, int]:
        """Returns the epoch of a sample's stream (0 if epochs share one), and the sample's number in that stream."""
        return (epoch, samples) if self._by_epoch else (0, epoch * self.num_samples + samples)

    def _read(self, phase: int, epoch: int, numbers: list[int], is_placeholder: bool) -> list[Any]:
        reader, first = self.readers.get(phase), min(numbers)
        if reader is not None and (reader.epoch, reader.process) != (epoch, os.getpid()):
            reader = None  # a forked worker must not share open files with its parent
        if reader is not None and first < reader.position and first not in reader.kept:
            if is_placeholder:  # samples of a placeholder batch do not count, so reuse the last batch
                return (reader.last * len(numbers))[: len(numbers)]
            reader = None
        if reader is None:
            reader = self.readers[phase] = self._begun(phase, epoch, first)
        if first >= reader.position:
            reader.kept = {}
            reader.note_place()
        self._go_on(reader, first, max(numbers) + 1)
        reader.last = [reader.kept[number] for number in numbers]
        return reader.last

    def _begun(self, phase: int, epoch: int, first: int) -> _Reader:
        """Returns a reader at the phase's restart point, or at sample 0 if the epoch has none at or before `first`."""
        place = self.begins.get(phase)
        if place is None or place.epoch != epoch or place.position > first:
            place = Place(epoch, 0, None)
        seed_draws(*random_bits(self.seed, epoch, np.array([-1]), 3)[0].tolist())
        source: Any = self.make_iterator(epoch) if self._by_epoch else self.make_iterator()
        if not hasattr(source, "__iter__"):
            raise UserError(f"{self.source} returned {type(source).__name__}, not an iterable; return an iterator")
        if place.state is not None:
            # The object is copied, since `make_iterator` may return it again for later epochs, and these must not start
            # at this state. The object's dictionary is copied too, because `copy.copy` may share it.
            source = copy.copy(source)
            if hasattr(source, "__dict__"):  # unlike an object with __slots__
                source.__dict__ = dict(vars(source))
            source.load_state_dict(place.state)
        return _Reader(epoch, place.position, source, iter(source), place.position)

    def _go_on(self, reader: _Reader, first: int, end: int) -> None:
        """Reads up to sample `end` - 1, and keeps samples from `first` on. Raises UserError if the stream ends."""
        while reader.position < end:
            numbers = np.arange(reader.position, min(end, reader.position + READ_AT_ONCE))
            for seeds in random_bits(self.seed, reader.epoch, numbers, 3).tolist():
                seed_draws(*seeds)
                try:
                    sample = next(reader.iterator)
                except StopIteration:
                    raise UserError(self._ended(reader)) from None
                if reader.position >= first:
                    reader.kept[reader.position] = sample
                reader.position += 1

    def _ended(self, reader: _Reader) -> str:
        number, size = reader.position, self.num_samples
        epoch = reader.epoch if self._by_epoch else number // size
        again = "" if self._by_epoch else ", or let make_iterator take the epoch and restart the stream in each epoch"
        return (
            f"{self.source}: the stream ended after {number} samples, within epoch {epoch + 1} of {size} samples; "
            f"lower samples_per_epoch{again}"
        )

    # --- saving and restoring ----------------------------------------------------------------------------------------

    def place_before(self, phase: int, epoch: int, samples: int) -> Place | None:
        """Returns the last known restart point before a sample of an epoch, or None."""
        (own_epoch, position), reader = self._place(epoch, samples), self.readers.get(phase)
        known = [self.begins.get(phase), *(reader.places if reader is not None else ())]
        before = [each for each in known if each and each.epoch == own_epoch and each.position <= position]
        return before[-1] if before else None

    def begin_at(self, phase: int, place: Place) -> None:
        """Sets the restart point for later batches. place: a result of `place_before`."""
        self.begins[phase] = place
        self.readers.pop(phase, None)

    def num_read_again(self, phase: int, epoch: int, samples: int) -> int:
        """Returns how many samples a resumed run must read again before it can continue at a sample of an epoch."""
        place = self.place_before(phase, epoch, samples)
        return self._place(epoch, samples)[1] - (place.position if place else 0)


def _takes_epoch(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # for example for a class implemented in C
        return False
    return any(each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD for each in parameters)
