"""Captures evaluation forwards as CUDA graphs, one per batch signature (names, shapes, strides and dtypes)."""

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
    dry_run,
    fill,
    signature,
)
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Outputs, PerSample

MOST_FORWARDS = 32
"""Maximum number of graphs kept for evaluation."""


class RecordedForward(NamedTuple):
    """CUDA graph of a forward. inputs: tensors to fill before a replay. results: tensors that the graph writes.

    per_sample: names of `PerSample` outputs. reads: other tensors that the graph reads, which must stay alive.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Batch
    results: Packed
    per_sample: frozenset[str]
    reads: Sequence[Tensor]


class RecordedForwards:
    """Runs the first forward of each batch signature eagerly, captures the second one, and then replays its graph.

    problem: why a capture failed, or None; after a failure, all forwards run eagerly.
    """

    def __init__(self, objective: Objective, strategy: Strategy) -> None:
        self._objective, self._strategy = objective, strategy
        self._recorder = Recorder(strategy.device)  # not the one of training, whose graphs are dropped separately
        self._recordings: Recordings[RecordedForward] = Recordings(MOST_FORWARDS)
        self.problem: str | None = None

    def clear(self) -> None:
        self._recordings.clear()

    def __call__(self, net: nn.Module, batch: Batch, account_of: Callable[[Exception], str]) -> Outputs:
        """Runs a forward; `batch` is in host memory. account_of: explains the exception of a failed capture."""
        key = signature(batch)
        recording = self._recordings.get(key)
        if recording is not None:
            return _replayed(recording, batch)
        if self.problem is not None or not self._recordings.is_wanted(key):
            return net(self._strategy.to_device(batch))
        try:
            with self._recorder.launching():
                recording = self._recorded(net, batch)
        except Exception as error:  # a user's forward may raise anything during capture
            self.problem = account_of(error)
            self.clear()
            return net(self._strategy.to_device(batch))
        self._recordings[key] = recording
        return _replayed(recording, batch)

    def _recorded(self, net: nn.Module, batch: Batch) -> RecordedForward:
        """Captures a forward after a dry run. Raises RuntimeError if the capture fails or changes the results."""
        drawn = self._strategy.places_in_generators()
        with self._strategy.keeping_generators(), leaving_no_trace(self._objective) as changes:
            net(self._uploaded(batch))
            if self._strategy.places_in_generators() != drawn:
                raise CannotBeRecorded("forward passes draw from the host's random generators")
            for change in changes():
                raise CannotBeRecorded(f"forward passes change {change.path}, but replays of a graph would not")
        inputs = self._uploaded(batch)
        with self._strategy.keeping_generators():
            expected, reads = dry_run(lambda: _tensors(net({**inputs})))
        per_sample: set[str] = set()

        def work() -> Packed:
            outputs: Outputs = net({**inputs})
            per_sample.update(name for name, value in outputs.items() if isinstance(value, PerSample))
            return Packed(_tensors(outputs))

        graph, results = self._recorder.record(work)
        recording = RecordedForward(graph, inputs, results, frozenset(per_sample), reads)
        with self._strategy.keeping_generators():
            found = _tensors(_replayed(recording, batch))
        name = difference(expected, found, lambda: found, lambda: expected, rounding=0.0)
        if name is not None:
            raise CannotBeRecorded(f"replays of a graph did not reproduce {name}")
        return recording

    def _uploaded(self, batch: Batch) -> Batch:
        return {name: tensor.to(self._strategy.device, copy=True) for name, tensor in batch.items()}


def _replayed(recording: RecordedForward, batch: Batch) -> Outputs:
    fill(recording.inputs, batch)
    found = recording.results.after(recording.graph.replay)
    return {name: PerSample(value) if name in recording.per_sample else value for name, value in found.items()}


def _tensors(outputs: Outputs) -> dict[str, Tensor]:
    return {name: value.values if isinstance(value, PerSample) else value for name, value in outputs.items()}
