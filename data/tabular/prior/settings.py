"""Settings of the prior: sizes of synthetic tables, and shares of each kind."""

import math
from dataclasses import dataclass

import numpy as np

from data.tabular.prior.randomness import SHAPE_STREAM
from trainer.loading.counter_random import uniform


@dataclass(frozen=True)
class PriorSettings:
    """Distribution of the tables; all ranges include both ends.

    rows: per table, context plus queries, log-uniform.
    features: columns per table, uniform.
    classes: maximum per table, 2 to 10. Half of the tables have two, the others a uniform number up to this.
    context_share: share of rows in the context, uniform.
    tree_share: share of tables whose causal model consists of trees rather than network layers.
    categorical_share, missing_share: share of tables in which columns may be categorical, or have gaps.
    tables_per_shape: consecutive tables of equal shape, which fill a batch without padding.
    """

    version: int = 1
    rows: tuple[int, int] = (64, 192)
    features: tuple[int, int] = (2, 12)
    classes: int = 10
    context_share: tuple[float, float] = (0.4, 0.8)
    tree_share: float = 0.3
    categorical_share: float = 0.6
    missing_share: float = 0.2
    tables_per_shape: int = 16

    def __post_init__(self) -> None:
        assert 32 <= self.rows[0] <= self.rows[1] and 1 <= self.features[0] <= self.features[1]
        assert 2 <= self.classes <= 10 and 0 < self.context_share[0] <= self.context_share[1] < 1

    def shape(self, seed: int, group: int) -> tuple[int, int, int]:
        """Returns (context rows, query rows, features) of a group, number // tables_per_shape."""
        rows, share, features = uniform(seed, 0, np.array([group]), (3,), SHAPE_STREAM)[0].tolist()
        fewest, most = self.rows
        num_rows = min(most, int(fewest * math.exp(rows * math.log((most + 1) / fewest))))
        low, high = self.context_share
        # the context must have a row of each class
        num_context = min(max(round(num_rows * (low + share * (high - low))), self.classes), num_rows - 1)
        return num_context, num_rows - num_context, self.features[0] + int(features * (1 + np.ptp(self.features)))
