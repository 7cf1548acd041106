"""Makes steps bit-identical on any number of devices, by cutting each global batch into `--parts` parts.

Gradients and sums of the parts are added in a fixed binary tree: parts 0 and 1, parts 2 and 3, then neighbouring pairs.
Each process runs consecutive parts that form a subtree, so the number of devices decides only which process performs an
addition.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.torch_private import foreach_add_
from trainer.loading.batches import WeightedBatch
from trainer.loop.buffers import Buffers
from trainer.loop.learner import Learner
from trainer.loop.totals import Totals
from trainer.parallel.flat_gradients import NOTHING
from trainer.parallel.group import Group, require_shape
from trainer.parallel.process_group import sum_of_neighbours
from trainer.parallel.strategy import Strategy
from trainer.task import Sums

Grads = Sequence[Tensor | None]


class TreeSum:
    """Sums a sequence of values in a binary tree.

    waiting: (level in the tree, partial sum) pairs, at most one per level.
    """

    def __init__(self, add: Callable[[Any, Any], Any] = Tensor.add_) -> None:
        """add: returns the sum of two values; may change the first value in place."""
        self._add = add
        self.waiting: list[tuple[int, Any]] = []

    def add(self, value: Any) -> None:
        level = 0
        while self.waiting and self.waiting[-1][0] == level:
            value, level = self._add(self.waiting.pop()[1], value), level + 1
        self.waiting.append((level, value))

    def total(self) -> Any | None:
        values = [value for _, value in self.waiting]
        while len(values) > 1:
            last = values.pop()
            values.append(self._add(values.pop(), last))
        return values[0] if values else None


class PartsLearner(Learner):
    """Learner for `--parts`: every micro-batch is one part with its own gradients. Skips parts without samples."""

    buffers: "PartBuffers"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffers = PartBuffers(self.objective)

    def accumulate(self, phase: str, micro_batch: WeightedBatch, factor: float, is_first: bool, is_last: bool) -> Sums:
        """Works like `Learner.accumulate`, but returns {} until the last part, and then the sums of all parts."""
        if is_first:
            self._rows: list[Sums] = []
            self._grads = TreeSum(add_grads)
        params, sums = self.params[phase], Sums()
        if micro_batch.num_samples > 0:
            # Every part starts without gradients (is_first) and exchanges none with other processes (not is_last).
            with self.buffers.of_part(micro_batch.num_samples) if self.buffers.is_active else nullcontext():
                sums = super().accumulate(phase, micro_batch, factor, is_first=True, is_last=False)
            self._grads.add(take_grads(params))
        self._rows.append({name: value.detach() for name, value in sums.items()})
        if not is_last:
            return {}
        for parameter, grad in zip(params, self._grads.total() or (), strict=False):
            parameter.grad = grad
        return as_rows(self._rows)


def take_grads(params: Sequence[Tensor]) -> Grads:
    """Returns the parameters' gradients and sets `grad` to None. Raises UserError for sparse gradients."""
    grads = [parameter.grad for parameter in params]
    if any(grad is not None and grad.is_sparse for grad in grads):
        raise UserError(
            "--parts: does not support sparse gradients (nn.Embedding(sparse=True)); build those embeddings without "
            "sparse=True, or leave --parts out"
        )
    for parameter in params:
        parameter.grad = None
    return grads


@torch.no_grad()
def add_grads(own: Grads, its: Grads) -> Grads:
    """Adds the gradients `its` to the gradients `own` in place and returns the sums; None counts as zero."""
    both = [(one, other) for one, other in zip(own, its, strict=True) if one is not None and other is not None]
    if both:
        foreach_add_(*map(list, zip(*both, strict=True)))
    return [other if one is None else one for one, other in zip(own, its, strict=True)]


def as_rows(parts: Sequence[Mapping[str, Tensor]]) -> Sums:
    """Stacks the sums of parts into (parts, ...) tensors by name; a sum that a part lacks counts as zero."""
    examples = {name: value for sums in parts for name, value in sums.items()}
    for name, example in examples.items():
        for sums in parts:
            require_shape(name, sums.get(name, example).shape, example.shape)
    return {
        name: torch.stack([sums.get(name, torch.zeros_like(example)) for sums in parts])
        for name, example in examples.items()
    }


class PartBuffers(Buffers):
    """Updates buffers with `--parts`: the forward of every part starts from the state before the step.

    A step changes running statistics by the mean of the parts' changes, weighted by their numbers of samples. It
    adds the changes of all parts to counters such as `num_batches_tracked`. All other state that forward passes change
    is taken from part 0.
    """

    def keep(self) -> None:
        super().keep()
        self._num_parts, self._changes = 0, TreeSum()

    @contextmanager
    def of_part(self, num_samples: int) -> Iterator[None]:
        """Context for a part's forward and backward pass. num_samples: size of the part, at least 1."""
        is_further = self._num_parts > 0 and self.forward_state.is_active
        self._num_parts += 1
        with self.forward_state.once_more() if is_further else nullcontext():
            yield
        if self._kinds:
            statistics, *counters = (kind.flattened() - kind.kept for kind in self._kinds)
            weighted = statistics * num_samples, torch.full_like(statistics[:1], num_samples)
            self._changes.add(torch.cat([*weighted, *(each.to(statistics.dtype) for each in counters)]))
            for kind in self._kinds:
                kind.set(kind.kept)

    def agree(self, strategy: Strategy) -> None:
        self.forward_state.agree(strategy)
        if not self._kinds:
            return
        kept = [kind.kept for kind in self._kinds]
        sizes = [len(kept[0]), 1, *map(len, kept[1:])]
        total = self._changes.total()
        if total is None:
            total = torch.full_like(kept[0][:1], NOTHING).repeat(sum(sizes))
        strategy.group.sum_in_tree(total)
        changes, num_samples, *counts = total.split(sizes)
        for kind, change in zip(self._kinds, [changes / num_samples, *counts], strict=True):
            kind.set(kind.kept + change.to(kind.kept.dtype))


class PartTotals(Totals):
    """Stores the sums of this process's parts as (parts, ...) tensors; `unreduced` and `reduced` add the parts.

    own: indices of this process's parts. rows: initial sums, (parts, ...) by name.
    """

    def __init__(self, own: Sequence[int], rows: Mapping[str, Tensor]) -> None:
        super().__init__(rows)
        self._own = own
        self._waiting: list[tuple[Sums, float]] = []

    def add(self, sums: Sums, weight: Any, applied: bool | Tensor = True) -> None:
        """Adds the sums of one part or of all parts. weight: number of loss terms, or a list of one number per part."""
        if isinstance(weight, list):
            weights = [weight[part] for part in self._own]
        else:
            self._waiting.append((sums, weight))
            if len(self._waiting) < len(self._own):
                return
            sums, weights = as_rows([own for own, _ in self._waiting]), [own for _, own in self._waiting]
            self._waiting = []
        if applied is False:
            sums, weights = {name: torch.zeros_like(value) for name, value in sums.items()}, [0.0] * len(weights)
        super().add(sums, weights, applied if isinstance(applied, Tensor) else True)

    def _added(self, before: Tensor | None, parts: Tensor) -> Tensor:
        """Adds values one by one, so that a save that reads the sums does not change the order of later additions."""
        return sum(parts, torch.zeros_like(parts[0]) if before is None else before)

    def unreduced(self) -> dict[str, Tensor]:
        return {name: sum_of_neighbours(value) for name, value in super().unreduced().items()}

    def reduced(self, group: Group) -> dict[str, Tensor]:
        return {name: sum_of_neighbours(value) for name, value in self.rows(group).items()}

    def rows(self, group: Group) -> dict[str, Tensor]:
        """Gathers the sums of all processes' parts as tensors (parts, ...). All processes must call this method."""
        return {
            name: value.flatten(0, 1) for name, value in as_rows(group.all_gather_object(super().unreduced())).items()
        }


def totals_maker(strategy: Strategy) -> Callable[[], Totals]:
    """Returns a function that creates empty totals: `PartTotals` with `--parts`, otherwise `Totals`."""
    return partial(restored_totals, strategy, {}, {}) if strategy.num_parts else Totals


def restored_totals(strategy: Strategy, total: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Totals:
    """Restores the sums of parts, `rows`, from a checkpoint. If `--parts` has changed, part 0 gets all of `total`."""
    if {len(value) for value in rows.values()} != {strategy.num_parts}:
        others = strategy.num_parts - 1
        rows = {name: torch.stack([value, *[torch.zeros_like(value)] * others]) for name, value in total.items()}
    own = [part for part, _ in strategy.shards]
    return PartTotals(own, {name: value[own].to(strategy.device) for name, value in rows.items()})
