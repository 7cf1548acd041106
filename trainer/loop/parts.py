"""A step whose global batch is cut into parts, on any number of devices alike (`--parts`).

What a forward and a backward come to is kept apart for each part, and added in one binary tree over all parts: part 0
to part 1, 2 to 3, then pairs to pairs. A process has consecutive parts, a subtree, so the devices only decide where an
addition is made: those between processes are made by `Group.sum_in_tree`.
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
    """The sum of values that come one after another, each added to its neighbour, pairs to pairs, and so on.

    waiting: at most one value for each level of the tree, with the level.
    """

    def __init__(self, add: Callable[[Any, Any], Any] = Tensor.add_) -> None:
        """add: returns the sum of two values; it may change the first one."""
        self._add = add
        self.waiting: list[tuple[int, Any]] = []

    def add(self, value: Any) -> None:
        level = 0
        while self.waiting and self.waiting[-1][0] == level:
            value, level = self._add(self.waiting.pop()[1], value), level + 1
        self.waiting.append((level, value))

    def total(self) -> Any | None:
        """The sum of all values, None of none."""
        values = [value for _, value in self.waiting]
        while len(values) > 1:
            last = values.pop()
            values.append(self._add(values.pop(), last))
        return values[0] if values else None


class PartsLearner(Learner):
    """A learner whose micro-batches are parts, each with a backward of its own. One without samples is left out."""

    buffers: "PartBuffers"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffers = PartBuffers(self.objective)

    def accumulate(
        self, strategy: Strategy, phase: str, micro_batch: WeightedBatch, factor: float, is_first: bool, is_last: bool
    ) -> Sums:
        """As of a `Learner`; returns the sums of all parts of the step with the last one, {} before."""
        if is_first:
            self._rows: list[Sums] = []
            self._grads = TreeSum(add_grads)
        params, sums = self.params[phase], Sums()
        if micro_batch.num_samples > 0:
            # It begins without gradients, and nothing travels with it.
            with self.buffers.of_part(micro_batch.num_samples) if self.buffers.is_active else nullcontext():
                sums = super().accumulate(strategy, phase, micro_batch, factor, is_first=True, is_last=False)
            self._grads.add(take_grads(params))
        self._rows.append({name: value.detach() for name, value in sums.items()})
        if not is_last:
            return {}
        for parameter, grad in zip(params, self._grads.total() or (), strict=False):
            parameter.grad = grad
        return as_rows(self._rows)


def take_grads(params: Sequence[Tensor]) -> Grads:
    """The gradients that a backward has left; afterwards no parameter has one. Raises UserError for sparse ones."""
    grads = [parameter.grad for parameter in params]
    if any(grad is not None and grad.is_sparse for grad in grads):
        raise UserError(
            "--parts: adds no sparse gradients, as those of nn.Embedding(sparse=True); build those embeddings without "
            "sparse=True, or leave --parts out"
        )
    for parameter in params:
        parameter.grad = None
    return grads


@torch.no_grad()
def add_grads(own: Grads, its: Grads) -> Grads:
    """Adds others in place; where there are none of a parameter, they are its."""
    both = [(one, other) for one, other in zip(own, its, strict=True) if one is not None and other is not None]
    if both:
        foreach_add_(*map(list, zip(*both, strict=True)))
    return [other if one is None else one for one, other in zip(own, its, strict=True)]


def as_rows(parts: Sequence[Mapping[str, Tensor]]) -> Sums:
    """Sums by name as (parts, ...) tensors, zeros where a part lacks one."""
    examples = {name: value for sums in parts for name, value in sums.items()}
    for name, example in examples.items():
        for sums in parts:
            require_shape(name, sums.get(name, example).shape, example.shape)
    return {
        name: torch.stack([sums.get(name, torch.zeros_like(example)) for sums in parts])
        for name, example in examples.items()
    }


class PartBuffers(Buffers):
    """Every part starts from what the model holds before the step.

    Running statistics then change by the mean of their changes in all parts, weighted by samples, and count the parts
    that have any. Of whatever else forwards change, all take what part 0 has left.
    """

    def keep(self) -> None:
        super().keep()
        self._num_parts, self._changes = 0, TreeSum()

    @contextmanager
    def of_part(self, num_samples: int) -> Iterator[None]:
        """Around forward and backward of a part. num_samples: at least 1."""
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
    """Totals of each part that this process computes, as (parts, ...) tensors; parts are added when they are read.

    own: which of all parts these are. rows: what there is of them already.
    """

    def __init__(self, own: Sequence[int], rows: Mapping[str, Tensor]) -> None:
        super().__init__(rows)
        self._own = own
        self._waiting: list[tuple[Sums, float]] = []

    def add(self, sums: Sums, weight: Any, applied: bool | Tensor = True) -> None:
        """weight: of all parts of a step, whose sums are `as_rows`; or of one part, after which the others follow."""
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
        """One after another, so that no read between two of them, as a save makes it, changes a bit."""
        return sum(parts, torch.zeros_like(parts[0]) if before is None else before)

    def unreduced(self) -> dict[str, Tensor]:
        return {name: sum_of_neighbours(value) for name, value in super().unreduced().items()}

    def reduced(self, group: Group) -> dict[str, Tensor]:
        return {name: sum_of_neighbours(value) for name, value in self.rows(group).items()}

    def rows(self, group: Group) -> dict[str, Tensor]:
        """The totals of all parts of all processes, (parts, ...). All of them call it."""
        return {name: value.flatten(0, 1) for name, value in as_rows(group.gather(super().unreduced())).items()}


def totals_maker(strategy: Strategy) -> Callable[[], Totals]:
    """Makes the totals of nothing, as this strategy sums."""
    return partial(restored_totals, strategy, {}, {}) if strategy.num_parts else Totals


def restored_totals(strategy: Strategy, total: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Totals:
    """Totals as a checkpoint holds them; of another number of parts, or of none, all of it counts as part 0's."""
    if {len(value) for value in rows.values()} != {strategy.num_parts}:
        others = strategy.num_parts - 1
        rows = {name: torch.stack([value, *[torch.zeros_like(value)] * others]) for name, value in total.items()}
    own = [part for part, _ in strategy.shards]
    return PartTotals(own, {name: value[own].to(strategy.device) for name, value in rows.items()})
