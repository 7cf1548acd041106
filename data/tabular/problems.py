"""A user's table as data sets: its rows, which are asked for, and problems made of its rows, which train a model."""

import numpy as np

from trainer.loading.cache import Arrays
from trainer.loading.counter_random import random_bits
from trainer.loading.order import SampleKeys

_STREAM = 7


class Rows:
    """Rows whose classes are asked for.

    A batch: row (B, m) float32; num_context (B,) int64, how many of the table's rows a model is told for it; label (B,)
    int64 where it is known.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray | None, num_context: int) -> None:
        """features: (n, m) float32, NaN where a value is missing. labels: (n,) int64."""
        self.features = features
        self.labels = labels
        self._num_context = num_context

    def __len__(self) -> int:
        return len(self.features)

    def __getitems__(self, keys: SampleKeys) -> Arrays:
        batch = {"row": self.features[keys.index], "num_context": np.full(len(keys.index), self._num_context)}
        return batch if self.labels is None else batch | {"label": self.labels[keys.index]}


class Episodes:
    """Problems that a table's own rows make: some of them are context, others are asked for.

    Columns and classes change places from one to the next, so that a model learns from what they hold. Where the table
    has more classes than the model, they are put together at random.

    A batch: context (B, N, m), queries (B, Q, m) float32; labels (B, N), targets (B, Q) int64, -1 for a class that the
    context does not hold; num_classes (B,) int64.
    """

    def __init__(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        num_episodes: int,
        *,
        num_context: int,
        num_queries: int,
        max_classes: int,
        seed: int,
    ) -> None:
        """features: (n, m) float32. labels: (n,) int64. num_context + num_queries: n at most."""
        self.features = features
        self.labels = labels
        self._num_episodes = num_episodes
        self._num_context = num_context
        self._num_rows = num_context + num_queries
        self._max_classes = max_classes
        self._seed = seed

    def __len__(self) -> int:
        return self._num_episodes

    def __getitems__(self, keys: SampleKeys) -> Arrays:
        num_rows, num_columns = self.features.shape
        num_classes = int(self.labels.max()) + 1
        # 64 bits each, so that hardly any are equal: how those would be sorted depends on the processor.
        draws = random_bits(self._seed, keys.epoch, keys.index, num_rows + num_columns + num_classes, _STREAM)
        by_row, by_column, by_class = np.split(draws, [num_rows, num_rows + num_columns], axis=1)
        rows = _smallest(by_row, self._num_rows)
        columns = by_column.argsort(axis=1)
        features = self.features[rows[:, :, None], columns[:, None, :]]
        renamed = by_class.argsort(axis=1) % self._max_classes
        labels = np.take_along_axis(renamed, self.labels[rows], axis=1)
        context, targets = labels[:, : self._num_context], labels[:, self._num_context :]
        number = min(num_classes, self._max_classes)
        occurs = (context[:, :, None] == np.arange(number)).any(axis=1)
        return {
            "context": features[:, : self._num_context],
            "labels": context,
            "queries": features[:, self._num_context :],
            "targets": np.where(np.take_along_axis(occurs, targets, axis=1), targets, -1),
            "num_classes": np.full(len(rows), number),
        }


def _smallest(values: np.ndarray, num: int) -> np.ndarray:
    """Where in each row of (n, m) its smallest ones are, the smallest first: (n, num)."""
    found = np.argpartition(values, num - 1, axis=1)[:, :num]
    return np.take_along_axis(found, np.take_along_axis(values, found, axis=1).argsort(axis=1), axis=1)
