"""Data without a length: samples that are asked for by the numbers in which a stream gives them."""

import copy
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import default_collate

from trainer.common.errors import UserError
from trainer.common.files import plain
from trainer.loading.counter_random import random_bits
from trainer.loading.order import SampleKeys
from trainer.loading.torch_datasets import KeyedItems, draws_put_back, seed_draws

READ_AT_ONCE = 4096
"""Samples whose random numbers are drawn together."""
STATE_EVERY_S, MOST_STATES = 1.0, 100
"""How often a stream is asked for its state, and how many of these wait for a checkpoint."""


def from_stream(
    make_iterator: Callable[..., Iterable[Any]],
    collate: Callable[[list[Any]], Any] | None = None,
    *,
    samples_per_epoch: int,
    seed: int,
    names: Sequence[str] | None = None,
) -> "KeyedStream":
    """A stream of samples, such as an IterableDataset, for `Task.splits`: what it gives comes in its own order.

    Example: `from_stream(lambda epoch: read(files), samples_per_epoch=10_000, seed=self.seed, names=("x", "y"))`.

    Every process reads all of the stream, and keeps the samples of its own batches. So a step has the same samples on
    any number of devices, and a run that resumes reads again what it has read before; it need not where what
    `make_iterator` returns has `state_dict()` and `load_state_dict(state)`, of plain values, which checkpoints keep.

    The random numbers that the stream draws for a sample from `random`, `numpy.random` and torch's default generator
    are a function of (seed, epoch, number of the sample), as in `from_dataset`.

    make_iterator: begins the stream, each time from its first sample, and returns an iterator or what has one. Where it
        needs an argument, it gets the epoch, from 0, and each epoch has a stream of its own; otherwise the stream goes
        on through all epochs.
    samples_per_epoch: at least 1; of a validation set all that it has.
    collate, seed, names: see `from_dataset`.

    Raises UserError, also when a batch is made: where the stream ends too soon.
    """
    if not callable(make_iterator):
        kind = type(make_iterator).__name__
        raise UserError(f"from_stream({kind}): it takes a function that begins the stream, as `lambda: iter(dataset)`")
    if type(samples_per_epoch) is not int or samples_per_epoch < 1:
        raise UserError(f"from_stream: samples_per_epoch {samples_per_epoch!r}: must be a whole number, at least 1")
    source = f"from_stream({getattr(make_iterator, '__name__', type(make_iterator).__name__)})"
    return KeyedStream(source, collate or default_collate, seed, names, make_iterator, samples_per_epoch)


class Place(NamedTuple):
    """Where a stream can be begun: the epoch that it is of, the samples before, and what the stream says of itself."""

    epoch: int
    position: int
    state: Any


@dataclass
class _Reader:
    """A stream that was begun.

    begun_at, position: the numbers of its first sample and of the one that comes next. kept: samples that were passed,
    by their numbers, as far as this batch or another part of its step may want them. last: those of the last batch.
    places: where it was before.
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
        """Asks the stream for its state, if it has any and was not asked a moment ago. Raises UserError.

        Before its first sample it may still say where an earlier epoch has ended.
        """
        is_due = self.position > self.begun_at and time.monotonic() - self.asked_at >= STATE_EVERY_S
        if not (is_due and hasattr(self.source, "state_dict")):
            return
        try:
            self.places.append(Place(self.epoch, self.position, plain(self.source.state_dict(), "its state_dict()")))
        except ValueError as error:
            raise UserError(f"from_stream: {error}") from None
        self.asked_at = time.monotonic()


@dataclass(eq=False)
class KeyedStream(KeyedItems):
    """What `from_stream` returns. One reader for each phase goes forward; for what it has passed it begins again.

    readers: by phase. begins: by phase, where a reader begins that does not begin at the start.
    """

    make_iterator: Callable[..., Iterable[Any]]
    num_samples: int
    readers: dict[int, _Reader] = field(default_factory=dict)
    begins: dict[int, Place] = field(default_factory=dict)

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
        """The epoch that a stream is of, and the number of a sample in that."""
        return (epoch, samples) if self._by_epoch else (0, epoch * self.num_samples + samples)

    def _read(self, phase: int, epoch: int, numbers: list[int], is_placeholder: bool) -> list[Any]:
        reader, first = self.readers.get(phase), min(numbers)
        if reader is not None and (reader.epoch, reader.process) != (epoch, os.getpid()):
            reader = None  # a worker that was forked shares no files with others
        if reader is not None and first < reader.position and first not in reader.kept:
            if is_placeholder:  # any will do, and these cost nothing
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
        """At the last place before a sample where it can be."""
        place = self.begins.get(phase)
        if place is None or place.epoch != epoch or place.position > first:
            place = Place(epoch, 0, None)
        seed_draws(*random_bits(self.seed, epoch, np.array([-1]), 3)[0].tolist())
        source: Any = self.make_iterator(epoch) if self._by_epoch else self.make_iterator()
        if place.state is not None:
            source = copy.copy(source)  # which would begin there in later epochs too, if they have the same one
            source.load_state_dict(place.state)
        return _Reader(epoch, place.position, source, iter(source), place.position)

    def _go_on(self, reader: _Reader, first: int, end: int) -> None:
        """Reads as far as a sample, and keeps what comes from the first one on. Raises UserError."""
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
        again = "" if self._by_epoch else ", or let make_iterator take the epoch and begin the stream again in each"
        return (
            f"{self.source}: the stream ended after {number} samples, in epoch {epoch + 1} of {size} samples each; "
            f"lower samples_per_epoch{again}"
        )

    # --- a checkpoint and back ---------------------------------------------------------------------------------------

    def place_before(self, phase: int, epoch: int, samples: int) -> Place | None:
        """The last one that is known before a sample of an epoch; None where the stream has no states of its own."""
        (own_epoch, position), reader = self._place(epoch, samples), self.readers.get(phase)
        known = [self.begins.get(phase), *(reader.places if reader is not None else ())]
        before = [each for each in known if each and each.epoch == own_epoch and each.position <= position]
        return before[-1] if before else None

    def begin_at(self, phase: int, place: Place) -> None:
        """place: of `place_before`, for the batches from there on."""
        self.begins[phase] = place
        self.readers.pop(phase, None)

    def num_read_again(self, phase: int, epoch: int, samples: int) -> int:
        """Samples that are passed before one of an epoch comes."""
        place = self.place_before(phase, epoch, samples)
        return self._place(epoch, samples)[1] - (place.position if place else 0)


def _takes_epoch(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # as of a class that is no Python
        return False
    return any(each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD for each in parameters)
