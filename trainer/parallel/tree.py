"""Global batches in parts (`--parts`): what is added up over them has the same bits on any number of devices.

Each part is a forward and a backward of its own, whose gradients are added in one binary tree over all parts: part 0
to part 1, 2 to 3, then pairs to pairs. A process has consecutive parts, a subtree, so the devices only decide where
an addition is made. -0.0 stands for what is not there: it is the number that changes no other when it is added.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.torch_private import foreach_add_, foreach_copy_
from trainer.failure.heartbeat import EXCHANGE
from trainer.parallel.ddp import Replicated
from trainer.parallel.flat_gradients import FlatGradients, fill
from trainer.parallel.group import Group
from trainer.parallel.strategy import SingleDevice, Strategy

NOTHING = -0.0


class TreeSum:
    """The sum of values that come one after another, each added to its neighbour, pairs to pairs, and so on.

    waiting: at most one value for each level of the tree, with the level. Values are added in place, by `add_`.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Any]] = []

    def add(self, value: Any, level: int = 0) -> None:
        """level: of the tree; a sum of two values is of level 1."""
        while (before := self.take(level)) is not None:
            before.add_(value)
            value, level = before, level + 1
        self.waiting.append((level, value))

    def take(self, level: int) -> Any | None:
        """Takes out the last value, if it is of that level and waits for another one to be added."""
        return self.waiting.pop()[1] if self.waiting and self.waiting[-1][0] == level else None

    def total(self) -> Any | None:
        """The sum of all values, None of none. No more are to come."""
        while len(self.waiting) > 1:
            _, value = self.waiting.pop()
            self.waiting[-1][1].add_(value)
        return self.waiting[0][1] if self.waiting else None


class GradientTree:
    """The gradients of the parts that this process computes, and their sum over all parts. params: of a phase."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._buffers: list[FlatGradients] = []
        self.begin()

    def begin(self) -> None:
        """Before the first part of a step."""
        self._sums, self._present = TreeSum(), [False] * len(self._params)

    @torch.no_grad()
    def add(self) -> None:
        """Takes the gradients of the next part. Afterwards no parameter has one. Raises UserError for sparse ones."""
        grads = [parameter.grad for parameter in self._params]
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise UserError(
                "--parts: adds no sparse gradients, as those of nn.Embedding(sparse=True); build those embeddings "
                "without sparse=True, or leave --parts out"
            )
        before = self._sums.take(0)
        sums: FlatGradients = before or self._next()
        found = [(view, grad) for view, grad in zip(sums.views, grads, strict=True) if grad is not None]
        if found:
            views, own = map(list, zip(*found, strict=True))
            (foreach_add_ if before else foreach_copy_)(views, own)
        for view, grad in zip(sums.views, grads, strict=True):
            if grad is None and not before:
                fill(view, NOTHING)
        self._present = [was or grad is not None for was, grad in zip(self._present, grads, strict=True)]
        for parameter in self._params:
            parameter.grad = None
        self._sums.add(sums, 1 if before else 0)

    def finish(self, group: Group) -> None:
        """After the last part: `grad` is the sum over the parts of all processes, None where none has a gradient."""
        sums: FlatGradients = self._sums.total() or self._next()
        sums.attach(self._present)
        if group.world_size > 1:
            sums.sum(group.sum_in_tree, NOTHING)

    def _next(self) -> FlatGradients:
        """The buffer for one more sum: each keeps its place while later ones are added to it."""
        if len(self._buffers) == len(self._sums.waiting):
            self._buffers.append(FlatGradients(self._params))
        return self._buffers[len(self._sums.waiting)]


class InParts(Strategy):
    """A strategy whose global batches are cut into parts; the parts of a process are its shards.

    num_parts: a multiple of the number of processes, both powers of two.
    """

    def __init__(self, *its: Any, num_parts: int) -> None:
        super().__init__(*its)
        self.num_parts = num_parts
        self._trees: dict[tuple[int, ...], GradientTree] = {}

    @property
    def shards(self) -> Sequence[tuple[int, int]]:
        own = self.num_parts // self.group.world_size
        return [(part, self.num_parts) for part in range(self.group.rank * own, (self.group.rank + 1) * own)]

    def seed_dropout(self, *key: int, same_everywhere: bool = False) -> None:
        """The last number of the key is that of a part among those of this process."""
        first = 0 if same_everywhere else self.group.rank * (self.num_parts // self.group.world_size)
        super().seed_dropout(*key[:-1], first + key[-1], same_everywhere=True)

    def tree_of(self, params: Sequence[Tensor]) -> GradientTree:
        """Where the gradients of a phase are added."""
        return self._trees.setdefault(tuple(map(id, params)), GradientTree(params))

    def exchange(self, params: Sequence[Tensor]) -> None:
        self.group.activity.enter(EXCHANGE)
        self.tree_of(params).finish(self.group)


class OneDeviceInParts(InParts, SingleDevice):
    """All parts one after another on one device."""


class ReplicatedInParts(InParts, Replicated):
    """Every process has the whole model and some of the parts; gradients travel after the last backward."""
