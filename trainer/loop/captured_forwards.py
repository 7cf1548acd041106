"""Captures evaluation forwards as CUDA graphs, one per batch signature (names, shapes, strides and dtypes)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.loading.batches import Batch
from trainer.loop.capture import (
    GraphCache,
    GraphPool,
    Packed,
    difference,
    fill,
    rehearse,
    signature,
)
from trainer.loop.module_state import leaving_no_trace
from trainer.loop.obstacles import CHANGES, DRAWS, CannotBeCaptured, explain
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Outputs, PerSample

MOST_FORWARDS = 32
"""Maximum number of graphs kept for evaluation."""


class CapturedForward(NamedTuple):
    """CUDA graph of a forward. inputs: tensors to fill before a replay. results: tensors that the graph writes.

    per_sample: names of `PerSample` outputs. reads: other tensors that the graph reads, which must stay alive.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Batch
    results: Packed
    per_sample: frozenset[str]
    reads: Sequence[Tensor]


class CapturedForwards:
    """Runs the first forward of each batch signature eagerly, captures the second one, and then replays its graph.

    problem: why a capture failed, or None; after a failure, all forwards run eagerly.
    """

    def __init__(self, objective: Objective, strategy: Strategy) -> None:
        self._objective, self._strategy = objective, strategy
        self._pool = GraphPool(strategy.device)  # not the pool of training, whose graphs are dropped separately
        self._graphs: GraphCache[CapturedForward] = GraphCache(MOST_FORWARDS)
        self.problem: str | None = None

    def clear(self) -> None:
        self._graphs.clear()

    def __call__(self, net: nn.Module, batch: Batch) -> Outputs:
        """Runs a forward; `batch` is in host memory."""
        key = signature(batch)
        captured = self._graphs.get(key)
        if captured is not None:
            return _replayed(captured, batch)
        if self.problem is not None or not self._graphs.is_wanted(key):
            return net(self._strategy.to_device(batch))
        try:
            with self._pool.launching():
                captured = self._capture(net, batch)
        except Exception as error:  # a user's forward may raise anything during capture
            self.problem = explain(error)
            self.clear()
            return net(self._strategy.to_device(batch))
        self._graphs[key] = captured
        return _replayed(captured, batch)

    def _capture(self, net: nn.Module, batch: Batch) -> CapturedForward:
        """Captures a forward after a rehearsal. Raises RuntimeError if the capture fails or changes the results."""
        drawn = self._strategy.places_in_generators()
        with self._strategy.keeping_generators(), leaving_no_trace(self._objective) as changes:
            net(self._uploaded(batch))
            if self._strategy.places_in_generators() != drawn:
                raise CannotBeCaptured(DRAWS)
            for change in changes():
                raise CannotBeCaptured(CHANGES.format(change.path))
        inputs = self._uploaded(batch)
        with self._strategy.keeping_generators():
            expected, reads = rehearse(lambda: _tensors(net({**inputs})))
        per_sample: set[str] = set()

        def work() -> Packed:
            outputs: Outputs = net({**inputs})
            per_sample.update(name for name, value in outputs.items() if isinstance(value, PerSample))
            return Packed(_tensors(outputs))

        graph, results = self._pool.capture(work)
        captured = CapturedForward(graph, inputs, results, frozenset(per_sample), reads)
        with self._strategy.keeping_generators():
            found = _tensors(_replayed(captured, batch))
        name = difference(expected, found, lambda: found, lambda: expected, rounding=0.0)
        if name is not None:
            raise CannotBeCaptured(f"replays of a graph did not reproduce {name}")
        return captured

    def _uploaded(self, batch: Batch) -> Batch:
        return {name: tensor.to(self._strategy.device, copy=True) for name, tensor in batch.items()}


def _replayed(captured: CapturedForward, batch: Batch) -> Outputs:
    fill(captured.inputs, batch)
    found = captured.results.after(captured.graph.replay)
    return {name: PerSample(value) if name in captured.per_sample else value for name, value in found.items()}


def _tensors(outputs: Outputs) -> dict[str, Tensor]:
    return {name: value.values if isinstance(value, PerSample) else value for name, value in outputs.items()}
