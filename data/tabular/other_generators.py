"""Toy classification problems that differ from the pre-training tables, for testing how a model generalises."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from trainer.loading.cache import Arrays
from trainer.loading.order import SampleKeys

_MOST_CLASSES = 10
_MOST_FEATURES = 12
_NOISE = 0.15

Problem = tuple[np.ndarray, np.ndarray]
"""Columns of shape (T, d) and labels of shape (T,), for T rows."""


def _blobs(random: Generator, num_rows: int) -> Problem:
    """Draws each class from a normal distribution with a random centre and width."""
    num_classes, num_features = random.integers(2, _MOST_CLASSES + 1), random.integers(2, 6)
    labels = random.integers(num_classes, size=num_rows)
    centres = 2 * random.normal(size=(num_classes, num_features))
    width = random.uniform(0.5, 1.5, num_classes)
    return centres[labels] + width[labels, None] * random.normal(size=(num_rows, num_features)), labels


def _moons(random: Generator, num_rows: int) -> Problem:
    """Draws points near two interlocking half circles, one per class."""
    labels = random.integers(2, size=num_rows)
    angle = np.pi * (random.uniform(size=num_rows) + labels)
    x = np.stack([np.cos(angle) + labels, np.sin(angle) + 0.5 * labels], axis=1)
    return x + _NOISE * random.normal(size=x.shape), labels


def _circles(random: Generator, num_rows: int) -> Problem:
    """Draws points near two or three nested circles or spherical shells, one per class."""
    labels = random.integers(random.integers(2, 4), size=num_rows)
    direction = random.normal(size=(num_rows, random.integers(2, 4)))
    x = direction / np.linalg.norm(direction, axis=1, keepdims=True) * (1 + labels[:, None])
    return x + _NOISE * random.normal(size=x.shape), labels


def _spirals(random: Generator, num_rows: int) -> Problem:
    """Draws points near spiral arms, one per class; each arm winds almost once around the centre."""
    num_classes = random.integers(2, 5)
    labels = random.integers(num_classes, size=num_rows)
    radius = random.uniform(0.2, 2.0, num_rows)
    angle = np.pi * radius + 2 * np.pi * labels / num_classes
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return x + 0.5 * _NOISE * random.normal(size=x.shape), labels


def _linear(random: Generator, num_rows: int) -> Problem:
    """Labels each row with the index of the largest of several noisy linear functions."""
    x = random.normal(size=(num_rows, random.integers(2, 9)))
    scores = x @ random.normal(size=(x.shape[1], random.integers(2, _MOST_CLASSES + 1)))
    return x, (scores + random.uniform(0, 1.5) * random.normal(size=scores.shape)).argmax(axis=1)


def _neighbours(random: Generator, num_rows: int) -> Problem:
    """Labels each row with the class of the nearest of several random points."""
    num_classes = random.integers(2, 7)
    x = random.uniform(size=(num_rows, random.integers(2, 5)))
    points = random.uniform(size=(3 * num_classes, x.shape[1]))
    nearest = np.linalg.norm(x[:, None] - points, axis=2).argmin(axis=1)
    return x, nearest % num_classes


def _rules(random: Generator, num_rows: int) -> Problem:
    """Labels rows of categories with the first class whose rule holds; if no rule holds, with the last class.

    A rule holds if at least one of two columns has the value that the rule requires.
    """
    num_classes, num_levels = random.integers(2, 6), random.integers(2, 6, size=6)
    x = random.integers(num_levels, size=(num_rows, 6))
    labels = np.full(num_rows, num_classes - 1)
    for label in range(num_classes - 1):
        columns = random.choice(6, 2, replace=False)
        holds = (x[:, columns] == random.integers(num_levels[columns])).any(axis=1)
        labels = np.where(holds & (labels == num_classes - 1), label, labels)
    return x.astype(float), labels


def _checkers(random: Generator, num_rows: int) -> Problem:
    """Labels each point by the colour of its checkerboard square."""
    x = random.uniform(-1, 1, size=(num_rows, 2))
    fields = np.floor(x * random.uniform(1.0, 1.5)).sum(axis=1)
    return x, fields.astype(np.int64) % 2


def _by_shares(random: Generator, scores: np.ndarray) -> np.ndarray:
    """Divides the range of scores into two to four classes of random sizes; returns labels of shape (T,)."""
    shares = np.cumsum(random.dirichlet(np.full(random.integers(2, 5), 3.0)))[:-1]
    return np.searchsorted(np.quantile(scores, shares), scores)


def _friedman(random: Generator, num_rows: int) -> Problem:
    """Labels rows by Friedman's first function (1991), which depends on five of ten columns."""
    x = random.uniform(size=(num_rows, 10))
    wave, bowl = np.sin(np.pi * x[:, 0] * x[:, 1]), np.square(x[:, 2] - 0.5)
    return x, _by_shares(random, 10 * wave + 20 * bowl + 10 * x[:, 3] + 5 * x[:, 4] + random.normal(size=num_rows))


def _hills(random: Generator, num_rows: int) -> Problem:
    """Labels points by the height of a landscape of Gaussian hills and valleys at random places."""
    x = random.uniform(-1, 1, (num_rows, random.integers(2, 7)))
    places = random.uniform(-1, 1, (12, x.shape[1]))
    distance = np.square(x[:, None] - places).sum(axis=2)
    height = np.exp(-distance / (0.2 * x.shape[1])) @ random.normal(size=12)
    return x, _by_shares(random, height + 0.1 * height.std() * random.normal(size=num_rows))


def _factors(random: Generator, num_rows: int) -> Problem:
    """Labels rows by three hidden factors. The columns are skewed: they are exponentials of mixtures of the factors."""
    factors = random.normal(size=(num_rows, 3))
    noise = 0.3 * random.normal(size=(num_rows, 9))
    x = np.exp((factors @ random.normal(size=(3, 9)) + noise) * random.uniform(0.2, 1.0, 9))
    return x, _by_shares(random, factors[:, 0] * factors[:, 1] + np.square(factors[:, 2]) + 0.3 * noise[:, 0])


def _shapes(random: Generator, num_rows: int) -> Problem:
    """Draws small integers whose means and correlations depend on the class, like measurements of printed letters."""
    num_classes, num_features = random.integers(6, _MOST_CLASSES + 1), random.integers(6, _MOST_FEATURES + 1)
    labels = random.integers(num_classes, size=num_rows)
    centres = 1.2 * random.normal(size=(num_classes, num_features))
    mixing = random.normal(size=(num_classes, num_features, num_features)) / np.sqrt(num_features)
    x = centres[labels] + np.einsum("tij,tj->ti", mixing[labels], random.normal(size=(num_rows, num_features)))
    return np.round(7 + 2.5 * x).clip(0, 15), labels


def _survey(random: Generator, num_rows: int) -> Problem:
    """Draws binary labels whose log-odds are a sum of saturating effects of numbers and effects of categories."""
    numbers = np.exp(random.normal(size=(num_rows, 4)))
    levels = random.integers(2, 30, size=4)
    categories = np.floor(levels * random.uniform(size=(num_rows, 4)) ** 2).astype(int)
    effects = random.normal(size=(4, 30))
    odds = np.tanh(numbers - 1) @ random.normal(size=4) + effects[np.arange(4), categories].sum(axis=1)
    odds += random.normal() * (numbers[:, 0] > 1) * effects[0, categories[:, 1]]
    labels = random.uniform(size=num_rows) < 1 / (1 + np.exp(-1.5 * (odds - np.quantile(odds, 0.7))))
    return np.concatenate([numbers, categories], axis=1), labels.astype(np.int64)


FAMILIES: tuple[Callable[[Generator, int], Problem], ...] = (
    _blobs,
    _moons,
    _circles,
    _spirals,
    _linear,
    _neighbours,
    _rules,
    _checkers,
    _friedman,
    _hills,
    _factors,
    _shapes,
    _survey,
)


class OtherTables:
    """Data set of synthetic tables. Table i depends only on (seed, i), and FAMILIES[i % len(FAMILIES)] generates it.

    num_context, num_queries: numbers of context and query rows per table. most_classes: largest number of classes per
    table; excess classes are merged. Batches have the format of `PriorTables`.
    """

    def __init__(
        self,
        seed: int,
        num_tables: int,
        num_context: int = 128,
        num_queries: int = 64,
        most_classes: int = _MOST_CLASSES,
    ) -> None:
        assert num_context >= _MOST_CLASSES
        self._most_classes = most_classes
        self._seed, self._num_tables = seed, num_tables
        self._num_context, self._num_queries = num_context, num_queries

    def __len__(self) -> int:
        return self._num_tables

    def __getitems__(self, keys: SampleKeys) -> Arrays:
        tables = [self._table(int(index)) for index in keys.index]
        num_features = np.array([x.shape[1] for x, _ in tables])
        rows = np.stack([np.pad(x, [(0, 0), (0, num_features.max() - x.shape[1])]) for x, _ in tables])
        labels = np.stack([labels for _, labels in tables])
        n = self._num_context
        return {
            "context": rows[:, :n].astype(np.float32),
            "labels": labels[:, :n],
            "queries": rows[:, n:].astype(np.float32),
            "targets": labels[:, n:],
            "num_context": np.full(len(tables), n),
            "num_features": num_features,
            "num_classes": labels.max(axis=1) + 1,
        }

    def _table(self, index: int) -> Problem:
        """Returns shuffled, randomly scaled columns (T, m), of which at most half are noise, and labels (T,)."""
        random = np.random.default_rng([self._seed, index])
        num_rows = self._num_context + self._num_queries
        x, labels = FAMILIES[index % len(FAMILIES)](random, num_rows)
        labels = labels % self._most_classes
        num_noise = random.integers(0, min(x.shape[1], _MOST_FEATURES - x.shape[1]) + 1)
        x = np.concatenate([x, random.normal(size=(num_rows, num_noise))], axis=1)
        x = x[:, random.permutation(x.shape[1])] * np.exp(random.normal(size=x.shape[1]))
        present, first, labels = np.unique(labels, return_index=True, return_inverse=True)
        labels = random.permutation(len(present))[labels]
        # One row of each class comes first, so that the context has every class.
        others = random.permutation(np.setdiff1d(np.arange(num_rows), first))
        order = np.concatenate([first, others])
        return x[order], labels[order]
