"""Scored task with two validation sets of unequal size, one of which has fewer samples than some runs have ranks."""

from functools import cached_property
from typing import ClassVar

from tests.helpers.scored_task import Points, Scored

SIZES = {"near": 11, "far": 2}


class Shifted(Scored):
    monitor = ("val/far/loss", "min")
    order_of_sets: ClassVar[tuple[str, ...]] = ("near", "far")

    @cached_property
    def _splits(self):
        splits = {"train": Points(25, 0), "test": Points(self.config.num_test, 2)}
        return splits | {f"val/{name}": Points(SIZES[name], SIZES[name]) for name in self.order_of_sets}


class AndPlain(Shifted):
    """Task with an additional validation set "val", which selects the best epoch."""

    monitor = ("val/auc", "max")

    @cached_property
    def _splits(self):
        return {**super()._splits, "val": Points(6, 6)}
