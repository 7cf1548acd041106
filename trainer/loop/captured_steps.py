"""Captures the work of training steps as CUDA graphs: forward and backward passes, and weight updates."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.loading.batches import Batch, WeightedBatch
from trainer.loop.capture import CapturedGraph, GraphPool, Packed, difference, rehearse
from trainer.loop.module_state import WholeState, first_change, outline
from trainer.loop.obstacles import CHANGES, CannotBeCaptured
from trainer.loop.precision import Precision, StepOutcome
from trainer.loop.totals import require_sums
from trainer.parallel.flat_gradients import FlatGradients
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Sums

ROUNDING, ROUNDING_OF_HALVES = 1e-4, 2e-2
"""Tolerances for nondeterministic kernels, relative to a tensor's largest absolute value: without and with autocast."""
LEAST_GAIN = 1.1
"""Speed-up below which `--cuda-graphs auto` drops a graph."""


class Gradients:
    """One phase's gradients, in flat buffers that CUDA graphs write to.

    present: whether each parameter has a gradient. is_attached: whether each parameter's `grad` agrees with `present`.
    """

    def __init__(self, params: Sequence[nn.Parameter], flat: FlatGradients) -> None:
        self.params, self.flat = params, flat
        self._none = (False,) * len(params)
        self.present, self.is_attached = self._none, True

    def begin(self) -> None:
        """Clears the gradients before the first micro-batch of a step and after the update."""
        if self.is_attached and any(self.present):
            self.flat.attach(self._none)
        self.present, self.is_attached = self._none, True

    def attach(self) -> None:
        if not self.is_attached:
            self.flat.attach(self.present)
        self.is_attached = True

    def collect(self) -> None:
        self.flat.collect()
        self.note_present()

    def note_present(self) -> None:
        """Notes which parameters have a gradient after an eager run or an exchange."""
        self.present, self.is_attached = self.flat.present, True

    def note_replay(self, present: tuple[bool, ...]) -> None:
        """Notes which gradients a replay wrote."""
        if self.is_attached and any(self.present):
            self.flat.attach(present)
        else:
            self.is_attached = False
        self.present = present

    def hand_out(self) -> None:
        """Replaces each parameter's `grad` with a copy that the next replay does not overwrite."""
        self.attach()
        self.flat.copy_out()


@dataclass
class Passes:
    """Forward and backward passes of a phase, which can be captured.

    net: module that computes the objective in the phase. factor: what a backward pass multiplies the loss by, a scalar
    on the device.
    """

    phase: str
    objective: Objective
    net: nn.Module
    strategy: Strategy
    precision: Precision
    gradients: Gradients
    factor: Tensor

    def run(self, batch: Batch) -> Sums:
        """Runs both passes eagerly, or as part of a capture, without exchanges between ranks. batch: on the device."""
        outputs = self.net(batch, self.phase)
        require_sums(outputs, self.objective, self.phase)
        self.precision.backward(outputs["loss"], self.factor)
        self.gradients.collect()
        return outputs

    def capture(self, pool: GraphPool, batch: Batch, before: "Snapshot") -> CapturedGraph:
        """Captures both passes after a rehearsal, which detects waits for the GPU. before: state to start from."""
        inputs = {name: tensor.to(self.strategy.device, copy=True) for name, tensor in batch.items()}

        def run() -> Packed:
            own = {name: tensor.detach() for name, tensor in inputs.items()}  # a forward may change this dictionary
            return Packed(self.run(own))

        before.restore()
        _, reads = rehearse(run)
        before.restore()
        return pool.capture(run, inputs, reads)._replace(present=self.gradients.present)

    def replay(self, captured: CapturedGraph, micro_batch: WeightedBatch, factor: float) -> Sums:
        captured.fill(micro_batch.batch)
        self.factor.fill_(factor)
        return captured.replay()

    def results(self, sums: Sums) -> dict[str, Tensor]:
        """Copies everything that the last run or replay computed: its sums, the gradients and the buffers, by name."""
        names = {parameter: name for name, parameter in self.objective.named_parameters()}
        gradients = zip(self.gradients.params, self.gradients.flat.views, self.gradients.present, strict=True)
        found = {f"the gradient of {names[parameter]}": view for parameter, view, is_there in gradients if is_there}
        found |= {f"the buffer {name}": buffer for name, buffer in self.objective.named_buffers()}
        return {name: value.detach().clone() for name, value in (found | sums).items()}


class Snapshot:
    """Copy of what passes change: gradients, buffers, attributes and random generators."""

    def __init__(self, passes: Passes) -> None:
        generators = torch.default_generator, torch.cuda.default_generators[passes.strategy.device.index]
        self._gradients, self._present = passes.gradients, passes.gradients.present
        self._flat = [flat.clone() for flat in passes.gradients.flat.flat]
        self._modules = WholeState(passes.objective)
        self._places = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for generator, place in self._places:
            generator.set_state(place)
        for flat, copy in zip(self._gradients.flat.flat, self._flat, strict=True):
            flat.copy_(copy)
        self._gradients.flat.attach(self._present)
        self._gradients.note_present()
        self._modules.put_back()


class Comparison:
    """Runs a micro-batch eagerly, then replays its graph from the same state, the state when the object is created.

    The results may differ, because a capture freezes Python numbers.
    """

    def __init__(self, passes: Passes, micro_batch: WeightedBatch, factor: float) -> None:
        passes.gradients.attach()
        self._passes, self._micro_batch, self._factor = passes, micro_batch, factor
        self._outline, self._before = outline(passes.objective), Snapshot(passes)
        self._replay_s = math.inf

    def run(self, run_eagerly: Callable[[], Sums]) -> Sums:
        self._sums, self._eager_s = timed(run_eagerly, self._passes.strategy.device)
        return self._sums

    def checked(self, captured: CapturedGraph | None, pool: GraphPool, only_if_faster: bool) -> CapturedGraph:
        """Returns a graph whose replays reproduce the eager run; captures it if `captured` is None.

        Raises CannotBeCaptured if they do not, or if `only_if_faster` and a new graph saves too little time. Restores
        the state after the eager run.
        """
        passes = self._passes
        after, expected = Snapshot(passes), passes.results(self._sums)
        try:
            with passes.strategy.preserving_rng_states():
                if (changed := first_change(self._outline, outline(passes.objective))) is not None:
                    raise CannotBeCaptured(CHANGES.format(changed))
                graph = captured or passes.capture(pool, self._micro_batch.batch, self._before)
                replay = partial(self._replay, graph)
                rounding = ROUNDING if passes.precision.autocast_dtype is None else ROUNDING_OF_HALVES
                if (name := difference(expected, replay(), replay, self._run_again, rounding)) is not None:
                    raise CannotBeCaptured(f"replays of a graph did not reproduce {name}")
                if only_if_faster and captured is None:
                    replay()  # the first replay may be slower
                    if self._eager_s < LEAST_GAIN * self._replay_s:
                        raise CannotBeCaptured(f"the speed-up of graphs is below {LEAST_GAIN}")
                return graph
        finally:
            after.restore()

    def _replay(self, graph: CapturedGraph) -> dict[str, Tensor]:
        """Replays the graph and returns its results; updates the time of the fastest replay."""
        passes = self._passes
        self._before.restore()
        sums, seconds = timed(lambda: passes.replay(graph, self._micro_batch, self._factor), passes.strategy.device)
        self._replay_s = min(seconds, self._replay_s)
        passes.gradients.note_replay(graph.present)
        return passes.results(sums)

    def _run_again(self) -> dict[str, Tensor]:
        """Runs the micro-batch eagerly, but without exchanges between ranks; returns the results."""
        self._before.restore()
        return self._passes.results(self._passes.run(self._passes.strategy.to_device(self._micro_batch.batch)))


def timed(function: Callable[[], Sums], device: torch.device) -> tuple[Sums, float]:
    """Returns a function's result, and the seconds until the device has computed it."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    sums = function()
    torch.cuda.synchronize(device)
    return sums, time.perf_counter() - start


def capture_update(
    pool: GraphPool, groups: Sequence[dict[str, Any]], gradients: Gradients, update: Callable[[], StepOutcome]
) -> CapturedGraph:
    """Captures a weight update, whose inputs are the learning rates of `groups`, the optimizers' parameter groups.

    Leaves weights, gradients and groups unchanged.
    """
    gradients.attach()
    present, before = gradients.present, [dict(group) for group in groups]
    try:
        rates = {str(number): torch.zeros((), device=pool.device) for number in range(len(groups))}
        for group, rate in zip(groups, rates.values(), strict=True):
            group |= {"lr": rate} | ({"capturable": True} if "capturable" in group else {})
        return pool.capture(lambda: Packed(update()._asdict()), rates)
    finally:
        for group, own in zip(groups, before, strict=True):
            group.update(own)
        gradients.flat.attach(present)
