"""Holds all state that an optimizer step reads or changes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature

import torch
from torch import Tensor, nn

from trainer.common.tensors import is_sharded, local_shards
from trainer.loading.batches import Batch, WeightedBatch
from trainer.loop.buffers import Buffers
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.precision import Precision, StepOutcome
from trainer.loop.totals import add_sums, require_sums, without_counting
from trainer.loop.watch import Watch
from trainer.parallel.rows import FORWARD
from trainer.parallel.strategy import Strategy
from trainer.task import At, Objective, Outputs, Sums


@dataclass
class Learner:
    """Runs forward passes, backward passes and optimizer updates of an objective.

    net: the objective in the run's precision. max_grad_norm: maximum gradient norm; 0 disables clipping. where: the
    run's step, epoch and progress, which the objective can read. watches: observers of moved weights.

    nets: `net` wrapped for training on the run's devices, by phase. params, optimizers: trained parameters and
    optimizers, by phase.
    """

    objective: Objective
    net: nn.Module
    strategy: Strategy
    precision: Precision
    max_grad_norm: float
    ema: ExponentialMovingAverage
    nets: dict[str, nn.Module] = field(default_factory=dict)
    params: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    optimizers: dict[str, list[torch.optim.Optimizer]] = field(default_factory=dict)
    where: At = At()
    watches: Sequence[Watch] = ()
    buffers: Buffers = field(init=False)
    _phase: str = field(default="", init=False)
    _shards: Callable[[Sequence[Tensor]], list[Tensor]] = field(default=list, init=False)

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.objective)
        self._tells_where = "at" in signature(self.objective.after_step).parameters

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.objective.parameters())

    def advice_if_diverged(self, peak: float) -> str:
        """Returns advice for error messages: flags that can prevent divergence. peak: peak learning rate."""
        clipping = f"stronger gradient clipping (--max-grad-norm, now {self.max_grad_norm:g}; 0 means no clipping)"
        return f"use a lower --lr (peak learning rate now {peak:g}), a longer warm-up (--warmup-epochs), or {clipping}"

    def set_trained(self, params: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """Sets the parameters that each phase trains; other parameters get no gradients."""
        self.params = {phase: list(own) for phase, own in params.items()}
        self._phase = ""
        self._shards = local_shards if any(is_sharded(p) for own in self.params.values() for p in own) else list
        for parameter in self.objective.parameters():
            parameter.requires_grad_(False)
        self.enter(next(iter(params)))

    def enter(self, phase: str) -> nn.Module:
        """Switches to a phase and returns its net; only the phase's parameters then require gradients.

        If all parameters required gradients, a backward pass would also add to other phases' gradients.
        """
        if phase != self._phase:
            for parameter in self.params.get(self._phase, ()):
                parameter.requires_grad_(False)
            for parameter in self.params[phase]:
                parameter.requires_grad_(True)
            self._phase = phase
        return self.nets.get(phase, self.net)

    def train(self) -> None:
        for net in self.nets.values():
            net.train()

    def launching(self) -> AbstractContextManager[None]:
        """Returns the context manager to train in; with CUDA graphs, it selects the GPU stream used for captures."""
        return nullcontext()

    def release(self) -> bool:
        """Frees device memory used only for speed, such as CUDA graphs; returns whether there was any."""
        return False

    def accumulate_window(
        self, phase: str, window: Sequence[WeightedBatch], factor: float, key: tuple[int, ...]
    ) -> Sums:
        """Accumulates the gradient of loss * factor over a step's micro-batches; returns the objective's sums.

        key: four numbers that seed dropout, together with the micro-batch's index.
        """
        sums: Sums = {}
        same_masks = self.objective.same_masks
        try:
            for i, micro_batch in enumerate(window):
                FORWARD.now = self.strategy, micro_batch.num_samples, len(window)
                self.strategy.seed_dropout(*key, 0 if same_masks else i, same_everywhere=same_masks)
                is_first, is_last = i == 0, i == len(window) - 1
                add_sums(sums, self.accumulate(phase, micro_batch, factor, is_first, is_last))
        finally:
            FORWARD.now = None
        return sums

    def accumulate(self, phase: str, micro_batch: WeightedBatch, factor: float, is_first: bool, is_last: bool) -> Sums:
        """Accumulates the gradient of a micro-batch's loss * factor; returns sums that carry an autograd graph.

        is_first, is_last: whether the micro-batch is the step's first or last.
        """
        net, strategy, activity = self.enter(phase), self.strategy, self.strategy.group.activity
        batch, _, num_samples = micro_batch
        within = self.buffers.of_samples(num_samples) if self.buffers.is_active else nullcontext()
        with strategy.gradient_sync(net, enabled=is_last), within:
            activity.enter("forward")
            outputs = net(strategy.to_device(batch), phase)
            require_sums(outputs, self.objective, phase)
            sums = outputs if num_samples > 0 else without_counting(outputs)
            if is_last and self.buffers.is_active:
                self.buffers.start_agreement(strategy.group)
            activity.enter("backward")
            self.precision.backward(sums["loss"], factor)
        return sums

    def begin_evaluation(self) -> None:
        """Prepares an evaluation; the model is in eval mode and has the weights to evaluate."""

    def evaluate(self, net: nn.Module, batch: Batch) -> Outputs:
        """Returns the objective's outputs for a batch in eval mode. net: from `Strategy.evaluation_module`."""
        outputs: Outputs = net(self.strategy.to_device(batch))
        return outputs

    def update(self, phase: str, learning_rate: float, global_norm: Callable[[Tensor], Tensor]) -> StepOutcome:
        """Sets the learning rate and steps the phase's optimizers.

        learning_rate: base rate, multiplied by each group's `lr_scale`. global_norm: combines the norms of all shards.
        """
        # Set just before the step: a rescue (a save after a failure) before the step must save the previous rates.
        for optimizer in self.optimizers[phase]:
            for group in optimizer.param_groups:
                group["lr"] = self.precision.rate(learning_rate * group.get("lr_scale", 1.0))
        return self.apply_gradients(phase, global_norm)

    def apply_gradients(self, phase: str, global_norm: Callable[[Tensor], Tensor]) -> StepOutcome:
        """Clips gradients, steps optimizers at current learning rates, and updates buffers and weight averages."""
        params = self.params[phase]
        outcome = self.precision.step(self.optimizers[phase], params, self.max_grad_norm, global_norm, self._shards)
        if self.buffers.is_active:
            self.buffers.undo_unless(outcome.applied)
        if outcome.applied is not False and type(self.objective).after_step is not Objective.after_step:
            with torch.no_grad():
                self.objective.after_step(phase, *([self.where] if self._tells_where else []))
        if self.ema.decay > 0:
            self.ema.update(outcome.applied, phase, params)
        return outcome
