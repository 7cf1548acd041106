"""Settings of the pre-training prior."""

import math
from dataclasses import dataclass

import numpy as np

from data.tabular.prior.randomness import SHAPE_STREAM
from trainer.loading.counter_random import uniform


@dataclass(frozen=True)
class PriorSettings:
    """Distribution of synthetic tables; all ranges include both ends.

    version: 1 for layered causal models, 2 for random graphs.
    rows: range of the number of rows per table, context plus queries, drawn log-uniformly.
    features: range of the number of columns per table, drawn uniformly.
    classes: largest number of classes per table, 2 to 10. Half of the tables have two classes; in the other half,
        the number is uniform from 2 to this limit.
    context_share: range of the share of rows in the context, drawn uniformly.
    tree_share: share of tables of version 1 whose causal model consists of trees rather than network layers.
    categorical_share: share of tables in which columns may be categorical.
    missing_share: share of tables in which columns may have missing values.
    tables_per_shape: number of consecutive tables of equal shape, which form a batch without padding.
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
        """Returns a table's (num_context, num_queries, num_features). group: table number // tables_per_shape."""
        rows, share, features = uniform(seed, 0, np.array([group]), (3,), SHAPE_STREAM)[0].tolist()
        fewest, most = self.rows
        num_rows = min(most, int(fewest * math.exp(rows * math.log((most + 1) / fewest))))
        low, high = self.context_share
        # The context must have a row of each class.
        num_context = min(max(round(num_rows * (low + share * (high - low))), self.classes), num_rows - 1)
        return num_context, num_rows - num_context, self.features[0] + int(features * (1 + np.ptp(self.features)))
