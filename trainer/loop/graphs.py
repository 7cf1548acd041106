"""Captures training steps as CUDA graphs, each replayed by a single launch.

With a small model a GPU waits for the host, which launches hundreds of kernels per step. One graph runs the forward and
backward pass of a micro-batch. Another graph runs the weight update, after processes have summed their gradients. Each
input signature (names, shapes, strides and dtypes) has its own graph. With deterministic kernels, a graph's
results are bit-identical to eager results. Work that cannot be captured runs eagerly.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.loading.batches import Batch, WeightedBatch
from trainer.loop.capture import CapturedGraph, GraphPool, Packed, difference, rehearse, signature
from trainer.loop.captured_forwards import CapturedForwards
from trainer.loop.learner import Learner
from trainer.loop.memory import OUT_OF_MEMORY, free_memory, lacks_memory
from trainer.loop.module_state import WholeState, first_change, outline, outline_of
from trainer.loop.obstacles import (
    CHANGES,
    SPARSE,
    CannotBeCaptured,
    explain,
    obstacle_to_forwards,
    obstacle_to_passes,
    obstacle_to_update,
)
from trainer.loop.parts import PartsLearner
from trainer.loop.precision import StepOutcome
from trainer.loop.progress import Progress
from trainer.loop.totals import require_sums
from trainer.loop.watch import Log, StepRecord, Watch
from trainer.parallel.flat_gradients import FlatGradients
from trainer.task import Objective, Outputs, Sums

Key = tuple[Any, ...]
T = TypeVar("T")

MOST_GRAPHS = 64
"""Maximum number of training graphs kept in memory."""
LEAST_FREE = 1 / 16
"""Fraction of the GPU's memory that must be free to capture further graphs."""
ROUNDING, ROUNDING_OF_HALVES = 1e-4, 2e-2
"""Tolerances for nondeterministic kernels, relative to a tensor's largest absolute value: without and with autocast."""
_OF_STEP = {"params", "lr"}
"""Parameter group entries that may change without making a graph invalid."""
LEAST_GAIN = 1.1
"""Speed-up below which `--cuda-graphs auto` drops a graph."""


class Gradients:
    """One phase's gradients, in flat buffers that CUDA graphs write to.

    present: whether each parameter has a gradient. is_attached: whether each parameter's `grad` agrees with `present`.
    """

    def __init__(self, params: Sequence[nn.Parameter], flat: FlatGradients) -> None:
        self.flat = flat
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
        self.present, self.is_attached = self.flat.present, True

    def hand_out(self) -> None:
        """Replaces each parameter's `grad` with a copy that the next replay does not overwrite."""
        self.attach()
        self.flat.copy_out()

    def replayed(self, present: tuple[bool, ...]) -> None:
        """Notes which gradients a replay wrote."""
        if self.is_attached and any(self.present):
            self.flat.attach(present)
        else:
            self.is_attached = False
        self.present = present


class Snapshot:
    """Snapshot of what forward and backward passes change: gradients, buffers, attributes and random generators."""

    def __init__(self, gradients: Gradients, objective: Objective, generators: Sequence[torch.Generator]) -> None:
        self._gradients, self.present = gradients, gradients.present
        self._flat = [flat.clone() for flat in gradients.flat.flat]
        self._modules = WholeState(objective)
        self._places = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for generator, place in self._places:
            generator.set_state(place)
        for flat, copy in zip(self._gradients.flat.flat, self._flat, strict=True):
            flat.copy_(copy)
        self._gradients.flat.attach(self.present)
        self._gradients.present, self._gradients.is_attached = self.present, True
        self._modules.put_back()


@dataclass
class GraphedLearner(Learner, Watch):
    """Learner that captures a CUDA graph at the second occurrence of an input signature, and replays it from then on.

    only_if_faster: whether to drop graphs whose speed-up is below `LEAST_GAIN`.

    _untried: signatures of graphs captured in this epoch. _due: signatures and phases whose next replay is compared
    with an eager run.
    """

    only_if_faster: bool = field(kw_only=True)
    _gradients: dict[str, Gradients | None] = field(default_factory=dict, init=False)
    _rates: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    _num_looks: Counter[Key] = field(default_factory=Counter, init=False)
    _untried: set[Key] = field(default_factory=set, init=False)
    _due: set[Key | str] = field(default_factory=set, init=False)
    _progress: Progress = field(default_factory=Progress, init=False)
    _problems_of_updates: dict[str, str] = field(default_factory=dict, init=False)
    _lines: list[str] = field(default_factory=list, init=False)
    _held: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._graphs = GraphPool(self.strategy.device, MOST_GRAPHS, LEAST_FREE)
        self._factor = torch.zeros((), dtype=torch.float64, device=self.strategy.device)
        self._forwards = CapturedForwards(self.objective, self.strategy)

    # --- as an observer ----------------------------------------------------------------------------------------------

    def remarks(self) -> Sequence[str]:
        lines = []
        for phase in self.params:
            if (problem := self._obstacle()) is not None:
                lines.append(self._line(phase, problem))
            elif (problem := self._obstacle_of_update(phase)) is not None:
                lines.append(self._line(phase, problem, "updates"))
        return lines

    def begin(self, progress: Progress) -> None:
        self._progress = progress

    def resume(self) -> None:
        """Drops all graphs if a module attribute, an optimizer setting or the address of a model tensor has changed.

        At an epoch's start, schedules a comparison with an eager run for each phase's next replay and each new graph.
        """
        if self._progress.position.at_epoch_start:
            self._due |= {*self.params, *self._untried}
            self._untried.clear()
        self.enter(next(iter(self.params)))  # so that every outline shows the same `requires_grad`
        held = outline(self.objective)
        for phase in self.params:
            for number, group in enumerate(self._groups(phase)):
                held |= {f"{phase} {number} {name}": outline_of(group[name]) for name in group.keys() - _OF_STEP}
        problem = obstacle_to_forwards(self.objective, self.strategy)  # a task may have added hooks since the last call
        if problem is not None:
            for phase in self.params:
                self._give_up(phase, problem)
        if held != self._held:
            self._graphs.clear()
        self._held = held

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        if self.strategy.group.world_size == 1:
            self.settle(log)

    def settle(self, log: Log) -> None:
        """Logs each new message once; if only some ranks have a message, names these ranks.

        All processes must call this method.
        """
        group = self.strategy.group
        of_ranks = [self._lines] if group.agrees(self._lines) else group.gather(self._lines)
        for line in dict.fromkeys(chain(*of_ranks)):
            ranks = [rank for rank, lines in enumerate(of_ranks) if line in lines]
            log.say(line if len(ranks) == len(of_ranks) else f"Rank {', '.join(map(str, ranks))}: {line}")
        self._lines = []

    def launching(self) -> AbstractContextManager[None]:
        gc.collect()  # frees tensors of forwards that ran on another stream
        return self._graphs.launching()

    def release(self) -> bool:
        had_graphs = bool(self._graphs)
        self._forget()
        self._gradients = dict.fromkeys(self.params)
        return had_graphs

    # --- forward and backward -----------------------------------------------------------------------------------------

    def accumulate(self, phase: str, micro_batch: WeightedBatch, factor: float, is_first: bool, is_last: bool) -> Sums:
        gradients, strategy = self._gradients_of(phase), self.strategy
        if gradients is None:
            return super().accumulate(phase, micro_batch, factor, is_first, is_last)
        if is_first:
            gradients.begin()
        self.enter(phase)
        key = "forward and backward", phase, gradients.present, *signature(micro_batch.batch)
        captured = self._graphs.get(key)

        def run_eagerly() -> Sums:
            gradients.attach()
            sums = super(GraphedLearner, self).accumulate(phase, micro_batch, factor, is_first, is_last)
            if any(
                p.grad is not None and p.grad.is_sparse for p in self.params[phase]
            ):  # from F.embedding(sparse=True), which `sparse_parameters` cannot find
                self._give_up(phase, SPARSE)
            else:
                gradients.collect()
            return {name: value.detach() for name, value in sums.items()}

        is_trusted = self._due.isdisjoint((key, phase))
        if micro_batch.num_samples == 0 or (captured is None and not self._graphs.is_wanted(key)):
            sums = run_eagerly()
        elif captured is None or not is_trusted:
            sums = self._accumulate_and_compare(key, phase, gradients, micro_batch, factor, run_eagerly)
        else:
            strategy.group.activity.enter("forward")
            present = captured.present
            del captured  # a reference would keep the graph's memory allocated
            found = self._attempt(lambda: self._replayed(self._graphs[key], micro_batch, factor))
            if found is not None:
                self.buffers.of_samples(micro_batch.num_samples)
                gradients.replayed(present)
                if is_last and self.buffers.is_active:
                    self.buffers.start_agreement(strategy.group)
            sums = run_eagerly() if found is None else found
        if strategy.num_parts:
            gradients.hand_out()
        elif is_last and strategy.group.world_size > 1:
            gradients.attach()
        return sums

    def _replayed(self, captured: CapturedGraph, micro_batch: WeightedBatch, factor: float) -> Sums:
        captured.fill(micro_batch.batch)
        self._factor.fill_(factor)
        return captured.replay()

    def _accumulate_and_compare(
        self,
        key: Key,
        phase: str,
        gradients: Gradients,
        micro_batch: WeightedBatch,
        factor: float,
        run_eagerly: Callable[[], Sums],
    ) -> Sums:
        """Runs a micro-batch eagerly, then replays its graph from the same state; returns the eager results.

        Captures a graph if the signature has none. If eager and replayed results differ, the phase stops using graphs.
        """
        captured = self._graphs.get(key)
        gradients.attach()
        held = outline(self.objective)
        try:
            before = self._snapshot(gradients)
        except RuntimeError as error:
            self._give_up(phase, explain(error))
            return run_eagerly()
        sums, eager_s = self._timed(run_eagerly)
        if self._gradients[phase] is None:
            return sums
        after, problem = None, None
        try:
            with self.strategy.keeping_generators():
                after, expected = self._snapshot(gradients), self._named(phase, gradients, sums)
                if (changed := first_change(held, outline(self.objective))) is not None:
                    raise CannotBeCaptured(CHANGES.format(changed))
                if captured is None:
                    captured = self._capture(phase, gradients, micro_batch, before)

                replayed_s: list[float] = []

                def replayed(made: CapturedGraph = captured) -> dict[str, Tensor]:
                    before.restore()
                    found, seconds = self._timed(lambda: self._replayed(made, micro_batch, factor))
                    replayed_s.append(seconds)
                    gradients.replayed(made.present)
                    return self._named(phase, gradients, found)

                def run_again() -> dict[str, Tensor]:  # unlike `run_eagerly`, without exchanges between ranks
                    before.restore()
                    inputs = self.strategy.to_device(micro_batch.batch)
                    return self._named(phase, gradients, self._forward_and_backward(phase, gradients, inputs))

                rounding = ROUNDING if self.precision.autocast_dtype is None else ROUNDING_OF_HALVES
                if (name := difference(expected, replayed(), replayed, run_again, rounding)) is not None:
                    raise CannotBeCaptured(f"replays of a graph did not reproduce {name}")
                if self.only_if_faster and key not in self._graphs:
                    replayed()  # the first replay may be slower
                    if eager_s < LEAST_GAIN * min(replayed_s):
                        raise CannotBeCaptured(f"the speed-up of graphs is below {LEAST_GAIN}")
        except Exception as error:  # a user's forward may raise anything during capture
            problem = explain(error)
        if after is not None:
            after.restore()
        if problem is not None:
            self._give_up(phase, problem)
        elif captured is not None:
            self._untried |= {key} - self._graphs.keys()
            self._graphs[key] = captured
            self._due -= {key, phase}
        return sums

    def _snapshot(self, gradients: Gradients) -> Snapshot:
        generators = torch.default_generator, torch.cuda.default_generators[self.strategy.device.index]
        return Snapshot(gradients, self.objective, generators)

    def _capture(self, phase: str, gradients: Gradients, micro_batch: WeightedBatch, before: Snapshot) -> CapturedGraph:
        """Captures forward and backward passes after a rehearsal, which detects waits for the GPU."""
        inputs = {name: tensor.to(self.strategy.device, copy=True) for name, tensor in micro_batch.batch.items()}

        def work() -> Packed:
            own = {name: tensor.detach() for name, tensor in inputs.items()}  # a forward may change this dictionary
            return Packed(self._forward_and_backward(phase, gradients, own))

        before.restore()
        _, reads = rehearse(work)
        before.restore()
        return self._graphs.capture(work, inputs, reads)._replace(present=gradients.present)

    def _forward_and_backward(self, phase: str, gradients: Gradients, inputs: Batch) -> Sums:
        outputs = self.enter(phase)(inputs, phase)
        require_sums(outputs, self.objective, phase)
        self.precision.backward(outputs["loss"], self._factor)
        gradients.collect()
        return outputs

    def _timed(self, function: Callable[[], Sums]) -> tuple[Sums, float]:
        torch.cuda.synchronize(self.strategy.device)
        start = time.perf_counter()
        sums = function()
        torch.cuda.synchronize(self.strategy.device)
        return sums, time.perf_counter() - start

    def _named(self, phase: str, gradients: Gradients, sums: Sums) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.objective.named_parameters()}
        present = zip(self.params[phase], gradients.flat.views, gradients.present, strict=True)
        found = {f"the gradient of {names[parameter]}": view for parameter, view, is_there in present if is_there}
        found |= {f"the buffer {name}": buffer for name, buffer in self.objective.named_buffers()}
        return {name: value.detach().clone() for name, value in (found | sums).items()}

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        self._forwards.begin()

    def evaluate(self, net: nn.Module, batch: Batch) -> Outputs:
        outputs = self._attempt(lambda: self._evaluated(net, batch)) if self._forwards.is_active else None
        return outputs if outputs is not None else super().evaluate(net, batch)

    def _evaluated(self, net: nn.Module, batch: Batch) -> Outputs:
        was_captured = self._forwards.problem is None
        outputs = self._forwards(net, batch)
        if was_captured and self._forwards.problem is not None:
            self._forget()
            self._lines.append(f"CUDA graphs: evaluation runs without a graph: {self._forwards.problem}.")
        return outputs

    # --- the update ---------------------------------------------------------------------------------------------------

    def update(self, phase: str, learning_rate: float, global_norm: Callable[[Tensor], Tensor]) -> StepOutcome:
        gradients = self._gradients.get(phase)
        if gradients is None:
            return super().update(phase, learning_rate, global_norm)
        # With --parts, summed gradients are outside the flat buffers. A sum over processes may add or remove gradients.
        if self.strategy.num_parts or self.strategy.group.world_size > 1:
            gradients.collect()
        key = "update", phase, gradients.present
        captured = self._graphs.get(key)
        if (
            captured is None
            and any(gradients.present)
            and not self._obstacle_of_update(phase)
            and self._graphs.is_wanted(key)
        ):
            captured = self._capture_update(key, phase, gradients, global_norm)
        if captured is None:
            gradients.attach()
            held = outline(self.objective) if self._may_replace(key, phase) else {}
            outcome = super().update(phase, learning_rate, global_norm)
            gradients.present, gradients.is_attached = gradients.flat.present, True
            if held and (changed := first_change(held, outline(self.objective))) is not None:
                for each in self.params:
                    self._give_up(each, f"a step replaces {changed}, but a graph would keep its old value")
            return outcome
        for rate, group in zip(self._rates[phase], self._groups(phase), strict=True):
            group["lr"] = self.precision.rate(learning_rate * group.get("lr_scale", 1.0))
            rate.fill_(group["lr"])
        del captured
        results = self._attempt(lambda: self._graphs[key].replay())
        if results is None:
            gradients.attach()
            return super().update(phase, learning_rate, global_norm)
        gradients.begin()
        return StepOutcome(**results)

    def _capture_update(
        self, key: Key, phase: str, gradients: Gradients, global_norm: Callable[[Tensor], Tensor]
    ) -> CapturedGraph | None:
        """Captures an update without changing weights; returns None if the capture fails."""
        gradients.attach()
        present = gradients.present
        groups = self._groups(phase)
        before = [dict(group) for group in groups]
        try:
            rates = self._rates.setdefault(phase, [torch.zeros((), device=self.strategy.device) for _ in groups])
            for group, rate in zip(groups, rates, strict=True):
                group |= {"lr": rate} | ({"capturable": True} if "capturable" in group else {})
            captured = self._graphs.capture(lambda: Packed(self.apply_gradients(phase, global_norm)._asdict()))
        except Exception as error:
            self.precision.forget_unscaling()
            problem = self._problems_of_updates[phase] = explain(error)
            self._lines.append(self._line(phase, problem, "updates"))
            self._forget()
            return None
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)
            gradients.flat.attach(present)
        self._graphs[key] = captured
        return captured

    def _groups(self, phase: str) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers[phase] for group in optimizer.param_groups]

    def _may_replace(self, key: Key, phase: str) -> bool:
        """Returns whether an update may replace model tensors; optimizers do so in their first steps, if at all."""
        self._num_looks[key] += 1
        is_own = type(self.objective).after_step is not Objective.after_step
        return is_own or (self._obstacle_of_update(phase) is not None and self._num_looks[key] < 5)

    # --- what is not captured -----------------------------------------------------------------------------------------

    def _gradients_of(self, phase: str) -> Gradients | None:
        if phase not in self._gradients:
            params, is_captured = self.params[phase], self._obstacle() is None
            gradients = Gradients(params, self.strategy.flat_gradients(params)) if is_captured else None
            self._gradients[phase] = gradients
        return self._gradients[phase]

    def _give_up(self, phase: str, problem: str) -> None:
        self._forget()
        gradients = self._gradients_of(phase)
        if gradients is not None:
            gradients.attach()
            self._lines.append(self._line(phase, problem))
        self._gradients[phase] = None

    def _forget(self) -> None:
        """Drops all graphs, because after a failed capture they would draw random numbers from a stale generator."""
        self._graphs.clear()
        self._forwards.clear()

    def _attempt(self, replay: Callable[[], T]) -> T | None:
        """Runs a replay; if memory runs out, drops all graphs and returns None."""
        try:
            return replay()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            self._forwards.problem = explain(error)
        # Frees memory outside the handler, because the exception's frames keep tensors alive.
        self.release()
        free_memory()
        self._lines.append(OUT_OF_MEMORY)
        return None

    def _line(self, phase: str, problem: str, what: str = "steps") -> str:
        which = f"{what} of phase {phase!r}" if len(self.params) > 1 else what
        return f"CUDA graphs: {which} run without a graph: {problem}."

    def _obstacle(self) -> str | None:
        return obstacle_to_passes(self.objective, self.strategy, self.precision, self.buffers)

    def _obstacle_of_update(self, phase: str) -> str | None:
        known = obstacle_to_update(self.objective, self.optimizers[phase], self.buffers)
        return known or self._problems_of_updates.get(phase)


class GraphedInParts(PartsLearner, GraphedLearner):
    """Learner for `--parts` that replays a graph for each part of a batch, and adds gradients between replays."""
