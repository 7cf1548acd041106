"""Forwards of evaluations as CUDA graphs, one for each signature."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.loading.batches import Batch
from trainer.loop.module_state import leaving_no_trace
from trainer.loop.recording import (
    CannotBeRecorded,
    Packed,
    Recorder,
    Recordings,
    difference,
    fill,
    rehearse,
    signature,
)
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Outputs, PerSample

MOST_FORWARDS = 32
"""Recordings that are kept."""


class RecordedForward(NamedTuple):
    """inputs: what is filled before it. results: what it writes. per_sample: names of outputs that are `PerSample`.

    reads: further tensors that it reads, whose memory it keeps.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Batch
    results: Packed
    per_sample: frozenset[str]
    reads: Sequence[Tensor]


class RecordedForwards:
    """Launches a signature once, records it when it comes again, and replays it from then on.

    problem: why forwards are launched as without graphs from now on, or None.
    """

    def __init__(self, objective: Objective, strategy: Strategy, recorder: Recorder) -> None:
        self._objective, self._strategy, self._recorder = objective, strategy, recorder
        self._recordings: Recordings[RecordedForward] = Recordings(MOST_FORWARDS)
        self.problem: str | None = None

    def clear(self) -> None:
        self._recordings.clear()

    def __call__(self, net: nn.Module, batch: Batch, account_of: Callable[[Exception], str]) -> Outputs:
        """What a module returns for a batch in host memory. account_of: says what stands in the way of a recording."""
        key = signature(batch)
        recording = self._recordings.used(key)
        if recording is not None:
            return _replayed(recording, batch)
        if self.problem is not None or not self._recordings.is_wanted(key):
            return net(self._strategy.to_device(batch))
        self._recordings.make_place()
        try:
            recording = self._recorded(net, batch)
        except Exception as error:  # an own forward may raise anything where it is recorded
            self.problem = account_of(error)
            self.clear()
            return net(self._strategy.to_device(batch))
        self._recordings[key] = recording
        return _replayed(recording, batch)

    def _recorded(self, net: nn.Module, batch: Batch) -> RecordedForward:
        """Raises RuntimeError for a forward that cannot be recorded, or would not do again what it does.

        A rehearsal comes first; what the recording comes to must have its bits.
        """
        drawn = self._strategy.places_in_generators()
        with self._strategy.keeping_generators(), leaving_no_trace(self._objective) as changes:
            net(self._uploaded(batch))
            if self._strategy.places_in_generators() != drawn:
                raise CannotBeRecorded("forwards draw from generators of the host")
            for change in changes():
                raise CannotBeRecorded(f"forwards give {change.path} another value, which a recording would not")
        inputs = self._uploaded(batch)
        with self._strategy.keeping_generators():
            expected, reads = rehearse(lambda: _tensors(net({**inputs})))
        per_sample: set[str] = set()

        def work() -> Packed:
            outputs: Outputs = net({**inputs})
            per_sample.update(name for name, value in outputs.items() if isinstance(value, PerSample))
            return Packed(_tensors(outputs))

        graph, results = self._recorder.record(work)
        recording = RecordedForward(graph, inputs, results, frozenset(per_sample), reads)
        with self._strategy.keeping_generators():
            found = _tensors(_replayed(recording, batch))
        name = difference(expected, found, lambda: expected, rounding=0.0)
        if name is not None:
            raise CannotBeRecorded(f"a recording came to another value of {name}")
        return recording

    def _uploaded(self, batch: Batch) -> Batch:
        return {name: tensor.to(self._strategy.device, copy=True) for name, tensor in batch.items()}


def _replayed(recording: RecordedForward, batch: Batch) -> Outputs:
    fill(recording.inputs, batch)
    found = recording.results.after(recording.graph.replay)
    return {name: PerSample(value) if name in recording.per_sample else value for name, value in found.items()}


def _tensors(outputs: Outputs) -> dict[str, Tensor]:
    return {name: value.values if isinstance(value, PerSample) else value for name, value in outputs.items()}
