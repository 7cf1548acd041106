"""Trains and evaluates with CUDA graphs, each replayed by a single launch.

With a small model a GPU waits for the host, which launches hundreds of kernels per step. One graph runs the forward and
backward pass of a micro-batch. Another graph runs the weight update, after processes have summed their gradients. Each
input signature (names, shapes, strides and dtypes) has its own graph. With deterministic kernels, a graph's
results are bit-identical to eager results. Work that cannot be captured runs eagerly.
"""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.loading.batches import Batch, WeightedBatch
from trainer.loop.capture import GraphPool, signature
from trainer.loop.captured_forwards import CapturedForwards
from trainer.loop.captured_steps import Comparison, Gradients, Passes, capture_update
from trainer.loop.learner import Learner
from trainer.loop.memory import OUT_OF_MEMORY, free_memory, lacks_memory
from trainer.loop.module_state import first_change, outline, outline_of
from trainer.loop.obstacles import SPARSE, explain, obstacle_to_forwards, obstacle_to_passes, obstacle_to_update
from trainer.loop.parts import PartsLearner
from trainer.loop.precision import StepOutcome
from trainer.loop.progress import Progress
from trainer.loop.watch import Log, StepRecord, Watch
from trainer.task import Objective, Outputs, Sums

Key = tuple[Any, ...]
T = TypeVar("T")

MOST_GRAPHS = 64
"""Maximum number of training graphs kept in memory."""
LEAST_FREE = 1 / 16
"""Fraction of the GPU's memory that must be free to capture further graphs."""
_OF_STEP = {"params", "lr"}
"""Parameter group entries that may change without making a graph invalid."""


@dataclass
class GraphedLearner(Learner, Watch):
    """Learner that captures a CUDA graph at the second occurrence of an input signature, and replays it from then on.

    only_if_faster: whether to drop graphs whose speed-up is below `LEAST_GAIN`.

    _passes: each phase's forward and backward passes, or None for a phase that runs eagerly. _untried: signatures of
    graphs captured in this epoch. _due: signatures and phases whose next replay is compared with an eager run.
    """

    only_if_faster: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._graphs = GraphPool(self.strategy.device, MOST_GRAPHS, LEAST_FREE)
        self._factor = torch.zeros((), dtype=torch.float64, device=self.strategy.device)
        self._forwards = CapturedForwards(self.objective, self.strategy)
        self._passes: dict[str, Passes | None] = {}
        self._num_looks: Counter[Key] = Counter()
        self._untried: set[Key] = set()
        self._due: set[Key | str] = set()
        self._progress = Progress()
        self._problems_of_updates: dict[str, str] = {}
        self._lines: list[str] = []
        self._outline: dict[str, Any] = {}

    # --- as an observer ----------------------------------------------------------------------------------------------

    def remarks(self) -> Sequence[str]:
        if (problem := self._obstacle_to_passes()) is not None:
            return [self._line(phase, problem) for phase in self.params]
        problems = {phase: self._obstacle_to_update(phase) for phase in self.params}
        return [self._line(phase, problem, "updates") for phase, problem in problems.items() if problem]

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
        before, self._outline = self._outline, outline(self.objective)
        for phase in self.params:
            for number, group in enumerate(self._groups(phase)):
                names = group.keys() - _OF_STEP
                self._outline |= {f"{phase} {number} {name}": outline_of(group[name]) for name in names}
        if (problem := obstacle_to_forwards(self.objective, self.strategy)) is not None:  # a task may have added hooks
            self._give_up(problem, *self.params)
        if self._outline != before:
            self._graphs.clear()

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        if self.strategy.group.world_size == 1:
            self.settle(log)

    def settle(self, log: Log) -> None:
        """Logs each new message once, and names its ranks if not all have it. All processes must call this method."""
        group = self.strategy.group
        of_ranks = [self._lines] if group.agrees(self._lines) else group.all_gather_object(self._lines)
        for line in dict.fromkeys(chain(*of_ranks)):
            ranks = [rank for rank, lines in enumerate(of_ranks) if line in lines]
            log.say(line if len(ranks) == len(of_ranks) else f"Rank {', '.join(map(str, ranks))}: {line}")
        self._lines = []

    def launching(self) -> AbstractContextManager[None]:
        gc.collect()  # frees tensors of forwards that ran on another stream
        return self._graphs.launching()

    def release(self) -> bool:
        had_graphs = bool(self._graphs)
        self._drop_graphs()
        self._passes = dict.fromkeys(self.params)
        return had_graphs

    # --- forward and backward -----------------------------------------------------------------------------------------

    def accumulate(self, phase: str, micro_batch: WeightedBatch, factor: float, is_first: bool, is_last: bool) -> Sums:
        passes = self._passes_of(phase)
        if passes is None:
            return super().accumulate(phase, micro_batch, factor, is_first, is_last)
        if is_first:
            passes.gradients.begin()
        self.enter(phase)
        key = "forward and backward", phase, passes.gradients.present, *signature(micro_batch.batch)
        run_eagerly = partial(self._accumulate_eagerly, passes, micro_batch, factor, is_first, is_last)
        is_new = key not in self._graphs
        if micro_batch.num_samples == 0 or (is_new and not self._graphs.is_wanted(key)):
            sums = run_eagerly()
        elif is_new or not self._due.isdisjoint((key, phase)):
            sums = self._accumulate_and_compare(key, passes, micro_batch, factor, run_eagerly)
        else:
            replayed = self._replay(key, passes, micro_batch, factor, is_last)
            sums = run_eagerly() if replayed is None else replayed
        if self.strategy.num_parts:
            passes.gradients.hand_out()
        elif is_last and self.strategy.group.world_size > 1:
            passes.gradients.attach()
        return sums

    def _accumulate_eagerly(
        self, passes: Passes, micro_batch: WeightedBatch, factor: float, is_first: bool, is_last: bool
    ) -> Sums:
        passes.gradients.attach()
        sums = super().accumulate(passes.phase, micro_batch, factor, is_first, is_last)
        # F.embedding(sparse=True) makes sparse gradients that `sparse_parameters` cannot find
        if any(p.grad is not None and p.grad.is_sparse for p in passes.gradients.params):
            self._give_up(SPARSE, passes.phase)
        else:
            passes.gradients.collect()
        return {name: value.detach() for name, value in sums.items()}

    def _accumulate_and_compare(
        self, key: Key, passes: Passes, micro_batch: WeightedBatch, factor: float, run_eagerly: Callable[[], Sums]
    ) -> Sums:
        """Runs a micro-batch eagerly, then replays its graph from the same state; returns the eager results.

        Captures a graph if the signature has none. If eager and replayed results differ, the phase stops using graphs.
        """
        phase = passes.phase
        try:
            comparison = Comparison(passes, micro_batch, factor)
        except RuntimeError as error:
            self._give_up(explain(error), phase)
            return run_eagerly()
        sums = comparison.run(run_eagerly)
        if self._passes[phase] is None:  # because of sparse gradients
            return sums
        try:
            captured = comparison.checked(self._graphs.get(key), self._graphs, self.only_if_faster)
        except Exception as error:  # a user's forward may raise anything during capture
            self._give_up(explain(error), phase)
            return sums
        self._untried |= {key} - self._graphs.keys()
        self._graphs[key] = captured
        self._due -= {key, phase}
        return sums

    def _replay(
        self, key: Key, passes: Passes, micro_batch: WeightedBatch, factor: float, is_last: bool
    ) -> Sums | None:
        """Replays the graph of a micro-batch, and returns its sums, or None if memory runs out."""
        self.strategy.group.activity.enter("forward")
        present = self._graphs[key].present
        # Looks the graph up where it is used, because a reference here would keep its memory allocated.
        sums = self._attempt(lambda: passes.replay(self._graphs[key], micro_batch, factor))
        if sums is not None:
            self.buffers.of_samples(micro_batch.num_samples)
            passes.gradients.note_replay(present)
            if is_last and self.buffers.is_active:
                self.buffers.start_agreement(self.strategy.group)
        return sums

    # --- the update ---------------------------------------------------------------------------------------------------

    def update(self, phase: str, learning_rate: float, global_norm: Callable[[Tensor], Tensor]) -> StepOutcome:
        passes = self._passes.get(phase)
        if passes is None:
            return super().update(phase, learning_rate, global_norm)
        gradients = passes.gradients
        # With --parts, summed gradients are outside the flat buffers. A sum over processes may add or remove gradients.
        if self.strategy.num_parts or self.strategy.group.world_size > 1:
            gradients.collect()
        key = "update", phase, gradients.present
        is_new = key not in self._graphs and any(gradients.present)
        if is_new and not self._obstacle_to_update(phase) and self._graphs.is_wanted(key):
            self._capture_update(key, passes, global_norm)
        if key not in self._graphs:
            return self._update_eagerly(key, passes, learning_rate, global_norm)
        for rate, group in zip(self._graphs[key].inputs.values(), self._groups(phase), strict=True):
            group["lr"] = self.precision.rate(learning_rate * group.get("lr_scale", 1.0))
            rate.fill_(group["lr"])
        results = self._attempt(lambda: self._graphs[key].replay())
        if results is None:
            gradients.attach()
            return super().update(phase, learning_rate, global_norm)
        gradients.begin()
        return StepOutcome(**results)

    def _capture_update(self, key: Key, passes: Passes, global_norm: Callable[[Tensor], Tensor]) -> None:
        update = partial(self.apply_gradients, passes.phase, global_norm)
        try:
            self._graphs[key] = capture_update(self._graphs, self._groups(passes.phase), passes.gradients, update)
        except Exception as error:
            self.precision.forget_unscaling()
            problem = self._problems_of_updates[passes.phase] = explain(error)
            self._lines.append(self._line(passes.phase, problem, "updates"))
            self._drop_graphs()

    def _update_eagerly(
        self, key: Key, passes: Passes, learning_rate: float, global_norm: Callable[[Tensor], Tensor]
    ) -> StepOutcome:
        passes.gradients.attach()
        self._num_looks[key] += 1
        has_own = type(self.objective).after_step is not Objective.after_step
        # If optimizers replace model tensors at all, they do so in their first steps.
        may_replace = has_own or (self._obstacle_to_update(passes.phase) is not None and self._num_looks[key] < 5)
        before = outline(self.objective) if may_replace else {}
        outcome = super().update(passes.phase, learning_rate, global_norm)
        passes.gradients.note_present()
        if before and (changed := first_change(before, outline(self.objective))) is not None:
            self._give_up(f"a step replaces {changed}, but a graph would keep its old value", *self.params)
        return outcome

    def _groups(self, phase: str) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers[phase] for group in optimizer.param_groups]

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        self._forwards.begin()

    def evaluate(self, net: nn.Module, batch: Batch) -> Outputs:
        before = self._forwards.problem
        outputs = self._attempt(lambda: self._forwards(net, batch)) if self._forwards.is_active else None
        if outputs is None:
            return super().evaluate(net, batch)
        if self._forwards.problem != before:
            self._drop_graphs()
            self._lines.append(f"CUDA graphs: evaluation runs without a graph: {self._forwards.problem}.")
        return outputs

    # --- when graphs cannot be used -----------------------------------------------------------------------------------

    def _obstacle_to_passes(self) -> str | None:
        return obstacle_to_passes(self.objective, self.strategy, self.precision, self.buffers)

    def _obstacle_to_update(self, phase: str) -> str | None:
        known = obstacle_to_update(self.objective, self.optimizers[phase], self.buffers)
        return known or self._problems_of_updates.get(phase)

    def _passes_of(self, phase: str) -> Passes | None:
        """Returns a phase's passes, or None if the phase runs eagerly."""
        if phase not in self._passes and self._obstacle_to_passes() is not None:
            self._passes[phase] = None
        elif phase not in self._passes:
            gradients = Gradients(self.params[phase], self.strategy.flat_gradients(self.params[phase]))
            of_learner = self.objective, self.nets.get(phase, self.net), self.strategy, self.precision
            self._passes[phase] = Passes(phase, *of_learner, gradients, self._factor)
        return self._passes[phase]

    def _give_up(self, problem: str, *phases: str) -> None:
        """Runs phases eagerly from now on."""
        self._drop_graphs()
        for phase in phases:
            passes = self._passes_of(phase)
            if passes is not None:
                passes.gradients.attach()
                self._lines.append(self._line(phase, problem))
            self._passes[phase] = None

    def _drop_graphs(self) -> None:
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


class GraphedInParts(PartsLearner, GraphedLearner):
    """Learner for `--parts` that replays a graph for each part of a batch, and adds gradients between replays."""
