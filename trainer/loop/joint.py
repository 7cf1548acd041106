"""Trains with a loss that compares all samples of a step, across devices (`Objective.joint_loss`).

Uses gradient caching (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP
2021). First, forward passes under `no_grad` compute the outputs, and the joint loss gives their gradients. Then the
forward passes run again with the same random numbers, and these gradients are backpropagated to the parameters. Memory
therefore holds one micro-batch's autograd graph at a time. With one micro-batch per device, each pass runs only once.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.common.torch_private import BATCH_NORMS
from trainer.loading.batches import Batch, WeightedBatch
from trainer.loop.learner import Learner
from trainer.loop.precision import in_precision
from trainer.loop.totals import require_sums, without_counting
from trainer.loop.watch import Watch
from trainer.parallel.rows import ALIKE, in_global_order, kinds_of, refuse_coupling
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Outputs, Rows, Sums

Share = tuple[Sums, Rows, list[tuple[Tensor, Tensor]]]
"""A joint loss's sums, its gradients with respect to outputs, by name, and (parameter, gradient) pairs."""


def refuse_joint(objective: Objective, strategy: Strategy, compiles: bool) -> None:
    """Raises UserError if the objective has a joint loss and the run has an option that joint losses do not support."""
    if not objective.is_joint:
        return
    name = f"{type(objective).__name__}.joint_loss"
    refuse_coupling(name, strategy)
    if strategy.exchanges_in_forward:
        raise UserError(f"--multi-gpu fsdp: {name} may use parameters while they are sharded; use --multi-gpu ddp")
    if compiles:
        raise UserError(f"--compile: {name} runs forward passes twice, but compiled passes may differ; omit --compile")


class JointForward(nn.Module):
    """Wraps an objective with a joint loss for training.

    use: computes a training forward pass's result from its outputs; if None, the result is the joint loss.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective
        self.use: Callable[[Rows], Sums] | None = None

    def forward(self, batch: Batch, *phase: str) -> Outputs:
        objective, size = self.objective, len(batch["weight"])
        if not objective.training:
            return objective(batch, *phase)
        rows = objective.outputs(batch, *phase)
        where = f"{type(objective).__name__}.outputs"
        if not isinstance(rows, dict) or not rows:
            raise UserError(f"{where}: must return a dict of tensors with a row for each sample")
        for name, value in rows.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (size,):
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UserError(f"{where}: {name!r} must have one row per sample ({size}), but is {found}")
        return objective.joint_loss(rows, *phase) if self.use is None else self.use(rows)


class JointLearner(Learner, Watch):
    """Learner for an objective with a joint loss."""

    _found: list[Rows] | None = None
    """Outputs of each micro-batch while forward passes run under `no_grad`; otherwise None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._forward = JointForward(self.objective)
        self.net = in_precision(self._forward, self.precision)

    def remarks(self) -> Sequence[str]:
        norms = [path for path, module in self.objective.named_modules() if isinstance(module, BATCH_NORMS)]
        line = (
            f"{type(self.objective).__name__}.joint_loss gets all rows of a step, but batch norms "
            f"({', '.join(norms)}) see only the samples of one forward pass, so results depend on --batch-size and "
            "the number of devices."
        )
        return [line] if norms else []

    def accumulate_window(
        self, phase: str, window: Sequence[WeightedBatch], factor: float, key: tuple[int, ...]
    ) -> Sums:
        """Runs a step's forward and backward passes; returns the sums over all ranks on rank 0, and zeros on others."""
        num_samples = [micro_batch.num_samples for micro_batch in window]
        shares_of = partial(self._shares, phase, num_samples, factor, key)
        try:
            if len(window) == 1:
                self._forward.use = lambda rows: _with_gradients(rows, *shares_of([rows])[0])
            else:
                self._forward.use, self._found = dict, []
                super().accumulate_window(phase, window, factor, key)
                found, self._found = self._found, None
                with self.buffers.of_joint_loss():
                    shares = iter(shares_of(found))
                self._forward.use = lambda rows: _with_gradients(rows, *next(shares))
                with self.buffers.forward_state.once_more():
                    return super().accumulate_window(phase, window, factor, key)
            return super().accumulate_window(phase, window, factor, key)
        finally:
            self._forward.use = self._found = None

    def accumulate(self, phase: str, micro_batch: WeightedBatch, factor: float, is_first: bool, is_last: bool) -> Sums:
        if self._found is None:
            return super().accumulate(phase, micro_batch, factor, is_first, is_last)
        net, strategy = self.enter(phase), self.strategy
        batch = strategy.to_device(micro_batch.batch)
        strategy.group.activity.enter("forward")
        within = self.buffers.of_samples(micro_batch.num_samples) if self.buffers.is_active else nullcontext()
        with torch.no_grad(), strategy.gradient_sync(net, enabled=False), within:
            self._found.append(net(batch, phase))
        return {}

    def _shares(
        self, phase: str, num_samples: list[int], factor: float, key: tuple[int, ...], outputs: Sequence[Rows]
    ) -> list[Share]:
        """Computes the joint loss, and returns each micro-batch's share of its sums and gradients.

        num_samples: samples in each micro-batch, 0 for a placeholder batch. outputs: of each micro-batch. Only the last
        share has nonzero sums, and gradients of the parameters that the joint loss uses directly.
        """
        counted = [part for part, num in zip(outputs, num_samples, strict=True) if num] or outputs[:1]
        kinds = [kinds_of(part) for part in counted]
        if (other := next((kind for kind in kinds if kind != kinds[0]), None)) is not None:
            raise UserError(f"{type(self.objective).__name__}.outputs: returned {kinds[0]} and {other}; {ALIKE}")
        own = {name: torch.cat([part[name].detach() for part in counted])[: sum(num_samples)] for name in counted[0]}
        group = self.strategy.group
        rows = {name: value.detach() for name, value in in_global_order(group, own).items()}
        self.strategy.seed_dropout(*key, 0, same_everywhere=True)
        group.activity.enter("forward")
        sums, of_rows, of_params = self._gradients(phase, rows, factor)
        zeros = without_counting(sums)
        if not group.is_main:  # every rank computed the sums over all ranks
            sums, of_params = zeros, [(parameter, torch.zeros_like(value)) for parameter, value in of_params]
        own_rows = {name: value[group.rank :: group.world_size].split(num_samples) for name, value in of_rows.items()}
        parts = [
            {name: value[i] for name, value in own_rows.items()} if num else {} for i, num in enumerate(num_samples)
        ]
        return [*((zeros, part, []) for part in parts[:-1]), (sums, parts[-1], of_params)]

    def _gradients(self, phase: str, rows: Rows, factor: float) -> Share:
        """Returns the joint loss's sums, and gradients of loss * factor with respect to outputs and parameters."""
        leaves = {name: value for name, value in rows.items() if value.is_floating_point() or value.is_complex()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        params: list[Tensor] = [*self.params[phase]]
        device = self.strategy.device.type
        with torch.enable_grad(), self.precision.autocast(device):
            sums = self.objective.joint_loss(rows, phase)
        require_sums(sums, self.objective, phase)
        start = self.precision.start(sums["loss"], factor)
        with torch.autocast(device, enabled=False):  # a backward runs without autocast, in its forward's dtypes
            found = torch.autograd.grad(sums["loss"], [*leaves.values(), *params], start, allow_unused=True)
        of_rows = {name: value for name, value in zip(leaves, found, strict=False) if value is not None}
        of_params = [(p, value) for p, value in zip(params, found[len(leaves) :], strict=True) if value is not None]
        return {name: value.detach() for name, value in sums.items()}, of_rows, of_params


def _with_gradients(rows: Rows, sums: Sums, of_rows: Rows, of_params: Sequence[tuple[Tensor, Tensor]]) -> Sums:
    """Returns `sums` with a loss whose backward pass sends the given gradients, or zeros, to outputs and parameters."""
    pairs = [(value, of_rows.get(name, torch.zeros_like(value))) for name, value in rows.items() if value.requires_grad]
    pairs += of_params
    loss = _Known.apply(sums["loss"], [gradient for _, gradient in pairs], *(value for value, _ in pairs))
    return {**sums, "loss": loss}


class _Known(torch.autograd.Function):
    """Autograd function that returns a given value and, in its backward, precomputed gradients of input tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, start: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradients
