"""Data sets from the user's table: rows to classify, and training problems sampled from the rows."""

import numpy as np

from trainer.loading.cache import Arrays
from trainer.loading.counter_random import random_bits
from trainer.loading.order import SampleKeys

_STREAM = 7


class Rows:
    """Data set of rows to classify.

    features: (n, m) float32, NaN where missing. labels: (n,) int64.

    A batch contains "row", (B, m) float32; "num_context", (B,) int64, the number of context rows that the model uses;
    and, if labels are known, "label", (B,) int64.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray | None, num_context: int) -> None:
        self.features = features
        self.labels = labels
        self._num_context = num_context

    def __len__(self) -> int:
        return len(self.features)

    def __getitems__(self, keys: SampleKeys) -> Arrays:
        batch = {"row": self.features[keys.index], "num_context": np.full(len(keys.index), self._num_context)}
        return batch if self.labels is None else batch | {"label": self.labels[keys.index]}


class Episodes:
    """Data set of problems whose context and query rows are sampled from one table.

    In each problem, columns and classes are permuted. If the table has more than max_classes classes, classes are
    merged at random.

    features: (n, m) float32. labels: (n,) int64. num_context + num_queries: at most n.

    A batch is {"context": (B, N, m) float32, "queries": (B, Q, m) float32, "labels": (B, N) int64, "targets": (B, Q)
    int64, -1 for a class that is absent from the context, "num_classes": (B,) int64}.
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
        # Ties, whose order depends on the processor, are improbable among 64-bit numbers.
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
    """Returns the positions of the num smallest values of each row, in ascending order of value: (n, m) -> (n, num)."""
    found = np.argpartition(values, num - 1, axis=1)[:, :num]
    return np.take_along_axis(found, np.take_along_axis(values, found, axis=1).argsort(axis=1), axis=1)
