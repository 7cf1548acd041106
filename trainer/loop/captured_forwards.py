"""Captures evaluation forwards as CUDA graphs, one per batch signature (names, shapes, strides and dtypes)."""

from typing import Any

from torch import nn

from trainer.loading.batches import Batch
from trainer.loop.capture import CapturedGraph, GraphPool, Packed, difference, rehearse, signature, tensors_of
from trainer.loop.module_state import leaving_no_trace, outline
from trainer.loop.obstacles import CHANGES, DRAWS, CannotBeCaptured, explain, obstacle_to_forwards
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Outputs

MOST_FORWARDS = 32
"""Maximum number of graphs kept for evaluation."""


class CapturedForwards:
    """Runs the first forward of each batch signature eagerly, captures the second one, and then replays its graph.

    problem: why a capture failed, or None; after a failure, all forwards run eagerly. is_active: whether the current
    evaluation may use graphs.
    """

    def __init__(self, objective: Objective, strategy: Strategy) -> None:
        self._objective, self._strategy = objective, strategy
        self._graphs = GraphPool(strategy.device, MOST_FORWARDS)  # apart from training's, which may be dropped alone
        self._outline: dict[str, Any] = {}
        self.problem: str | None = None
        self.is_active = False

    def begin(self) -> None:
        """Begins an evaluation, which is eager if a model tensor or attribute was replaced since the last one."""
        before, self._outline = self._outline, outline(self._objective)
        is_same = self._outline == before
        if not is_same:
            self.clear()
        self.is_active = is_same and obstacle_to_forwards(self._objective, self._strategy) is None

    def clear(self) -> None:
        self._graphs.clear()

    def __call__(self, net: nn.Module, batch: Batch) -> Outputs:
        """Runs a forward; `batch` is in host memory."""
        key = signature(batch)
        captured = self._graphs.get(key)
        if captured is not None:
            return _replay(captured, batch)
        if self.problem is not None or not self._graphs.is_wanted(key):
            return net(self._strategy.to_device(batch))
        try:
            with self._graphs.launching():
                captured = self._capture(net, batch)
        except Exception as error:  # a user's forward may raise anything during capture
            self.problem = explain(error)
            self.clear()
            return net(self._strategy.to_device(batch))
        self._graphs[key] = captured
        return _replay(captured, batch)

    def _capture(self, net: nn.Module, batch: Batch) -> CapturedGraph:
        """Captures a forward after a rehearsal. Raises RuntimeError if the capture fails or changes the results."""
        drawn = self._strategy.rng_positions()
        with self._strategy.preserving_rng_states(), leaving_no_trace(self._objective) as changes:
            net(self._uploaded(batch))
            if self._strategy.rng_positions() != drawn:
                raise CannotBeCaptured(DRAWS)
            for change in changes():
                raise CannotBeCaptured(CHANGES.format(change.path))
        inputs = self._uploaded(batch)
        with self._strategy.preserving_rng_states():
            expected, reads = rehearse(lambda: tensors_of(net({**inputs})))
        captured = self._graphs.capture(lambda: Packed(net({**inputs})), inputs, reads)
        with self._strategy.preserving_rng_states():
            found = tensors_of(_replay(captured, batch))
        name = difference(expected, found, lambda: found, lambda: expected, rounding=0.0)
        if name is not None:
            raise CannotBeCaptured(f"replays of a graph did not reproduce {name}")
        return captured

    def _uploaded(self, batch: Batch) -> Batch:
        return {name: tensor.to(self._strategy.device, copy=True) for name, tensor in batch.items()}


def _replay(captured: CapturedGraph, batch: Batch) -> Outputs:
    captured.fill(batch)
    return captured.replay()
