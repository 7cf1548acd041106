"""Computes the units (hidden variables) of a synthetic table with a random graph of functions.

The design follows TabICLv2 (Qu et al., arXiv 2602.11139, section 5): sparse and dense graphs, networks, Gaussian
processes, trees, linear and quadratic functions, products, and hyper-parameters that are correlated within a table.
Every table has its own random generator, so a table depends only on (seed, number, attempt).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.random import Generator

from data.tabular.prior.activations import FUNCTIONS, MOST_ARGUMENT

MOST_NODES = 32
"""Largest number of nodes of a graph; the smallest number is 2."""
_MOST_PARENTS = 4
_MOST_EXTRA = 3
"""Largest number of a node's units that neither a column nor the classes use."""
_NUM_WAVES = 64
_MOST_TREES, _MOST_DEPTH = 12, 5
_MOST_CENTRES = 24
_MOST_INPUTS = 12
"""Largest number of inputs of a quadratic function, which ignores further inputs."""
_TINY = 1e-6


class _Habits:
    """Random choices for one table; repeated choices of the same kind resemble each other."""

    def __init__(self, random: Generator) -> None:
        self.random = random
        self._means: dict[str, tuple[float, float]] = {}
        self._functions = random.dirichlet(np.full(len(_FUNCTIONS), 0.4))

    def share(self, kind: str) -> float:
        """Draws a number in [0, 1] from a beta distribution, whose parameters are drawn once per kind of choice."""
        if kind not in self._means:
            mean, strength = self.random.uniform(0.05, 0.95), math.exp(self.random.uniform(math.log(0.5), math.log(50)))
            self._means[kind] = strength * mean, strength * (1 - mean)
        return float(self.random.beta(*self._means[kind]))

    def integer(self, kind: str, low: int, high: int) -> int:
        """Draws an integer from low to high, inclusive."""
        return min(high, low + int(self.share(kind) * (high - low + 1)))

    def log_between(self, kind: str, low: float, high: float) -> float:
        return low * (high / low) ** self.share(kind)

    def function(self) -> "_Function":
        return _FUNCTIONS[self.chosen(self._functions)]

    def chosen(self, weights: np.ndarray, *shape: int) -> np.ndarray:
        """Draws indices with probabilities in proportion to weights, (n,); returns int64 of the given shape."""
        total = weights.cumsum()
        return np.searchsorted(total[:-1], self.random.random(shape) * total[-1], side="right")

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32)

    def weights(self, *shape: int) -> np.ndarray:
        """Draws normal weights, (inputs, ...), scaled by a power law over the inputs in random order."""
        decay = np.arange(1, shape[0] + 1, dtype=np.float32) ** -(2 * self.share("decay"))
        scale = self.random.permutation(decay / np.sqrt(np.square(decay).sum()))
        return self.normal(*shape) * scale.reshape(-1, *[1] * (len(shape) - 1))


_Function = Callable[[_Habits, np.ndarray, int], np.ndarray]
"""Function that maps (habits, inputs (T, d), width) to values (T, width)."""


def draw_graph(seed: int, number: int, attempt: int, num_columns: int, num_classes: int, num_rows: int) -> np.ndarray:
    """Draws the standardised units of one table, (num_columns + num_classes, T) float32.

    The classes are derived from the last num_classes units, which belong to one node.
    """
    habits = _Habits(np.random.default_rng([2, attempt, number, seed % 2**63]))
    random = habits.random
    num_nodes = int(2 * (MOST_NODES / 2 + 0.5) ** random.uniform())
    node_of_column = habits.chosen(random.dirichlet(np.ones(num_nodes)), num_columns)
    node_of_classes = max(random.integers(num_nodes, size=2))
    shown = np.bincount(node_of_column, minlength=num_nodes)
    widths = shown + random.integers(0, _MOST_EXTRA + 1, num_nodes)
    widths[node_of_classes] += num_classes
    values: list[np.ndarray] = []
    for width, parents in zip(np.maximum(widths, 1).tolist(), _edges(random, num_nodes), strict=True):
        x = _node(habits, [values[parent] for parent in parents], width, num_rows)
        noise = habits.log_between("noise", 1e-4, 0.5)
        values.append(_standardised(x + np.float32(noise) * habits.normal(*x.shape)))
    units = np.empty((num_columns + num_classes, num_rows), np.float32)
    for node, x in enumerate(values):
        units[:num_columns][node_of_column == node] = x[:, : shown[node]].T
    units[num_columns:] = values[node_of_classes][:, shown[node_of_classes] :][:, :num_classes].T
    return units


def _edges(random: Generator, num_nodes: int) -> list[np.ndarray]:
    """Draws each node's parents among earlier nodes, as in TabICLv2's Cauchy graph, in which some nodes are hubs."""
    bias, out, into = random.standard_cauchy(), random.standard_cauchy(num_nodes), random.standard_cauchy(num_nodes)
    logits = (bias + out[:, None] + into).clip(-30, 30)
    is_edge = random.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))
    return [random.permutation(np.flatnonzero(is_edge[:node, node]))[:_MOST_PARENTS] for node in range(num_nodes)]


def _node(habits: _Habits, parents: list[np.ndarray], width: int, num_rows: int) -> np.ndarray:
    """Computes a node's units from its parents with one or several functions; draws the units if it has no parents."""
    if not parents:
        return _root(habits, width, num_rows)
    if len(parents) == 1 or habits.share("together") < 0.5:
        return habits.function()(habits, np.concatenate(parents, axis=1), width)
    parts = [_standardised(habits.function()(habits, parent, width)) for parent in parents]
    joined = habits.integer("joining", 0, 3)
    if joined == 0:
        return np.maximum.reduce(parts)
    return np.prod(parts, axis=0) if joined == 1 else np.sum(parts, axis=0)


def _root(habits: _Habits, width: int, num_rows: int) -> np.ndarray:
    """Draws the units of a node without parents: normal, uniform or clustered values, which may be correlated."""
    random, kind = habits.random, habits.integer("root", 0, 2)
    x = habits.normal(num_rows, width) if kind != 1 else random.random((num_rows, width), np.float32) * 3.5 - 1.75
    if kind == 2:
        centres = habits.normal(habits.integer("centres", 2, _MOST_CENTRES), width)
        x = centres[random.integers(len(centres), size=num_rows)] + habits.share("spread") * x
    return x @ habits.weights(width, width) if habits.share("mixing") < 0.5 else x


def _standardised(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=0)
    return (centred / (np.sqrt(np.square(centred).mean(axis=0)) + np.float32(_TINY))).clip(-20, 20)


# --- functions -------------------------------------------------------------------------------------------------------


def _linear(habits: _Habits, x: np.ndarray, width: int) -> np.ndarray:
    return x @ habits.weights(x.shape[1], width)


def _quadratic(habits: _Habits, x: np.ndarray, width: int) -> np.ndarray:
    x = np.concatenate([np.ones((len(x), 1), np.float32), x[:, :_MOST_INPUTS]], axis=1)
    return np.stack([((x @ habits.weights(x.shape[1], x.shape[1])) * x).sum(axis=1) for _ in range(width)], axis=1)


def _network(habits: _Habits, x: np.ndarray, width: int) -> np.ndarray:
    """Applies a random network with one or two hidden layers, each with a random activation function."""
    for _ in range(habits.integer("layers", 1, 2)):
        hidden = _standardised(x @ habits.weights(x.shape[1], habits.integer("hidden", 3, 32)))
        steepness, shift = habits.log_between("steepness", 0.3, 3), habits.normal(hidden.shape[1])
        arguments = torch.from_numpy(steepness * hidden + shift).clamp_(-MOST_ARGUMENT, MOST_ARGUMENT)
        x = FUNCTIONS[habits.integer("activation", 0, len(FUNCTIONS) - 1)](arguments).numpy()
    return x @ habits.weights(x.shape[1], width)


def _gaussian_process(habits: _Habits, x: np.ndarray, width: int) -> np.ndarray:
    """Applies a sum of random Fourier features, whose heavy-tailed frequencies imitate a Matern kernel."""
    random, smoothness = habits.random, habits.log_between("smoothness", 0.5, 10)
    frequencies = habits.weights(x.shape[1], _NUM_WAVES) * habits.log_between("frequency", 0.3, 3)
    scales = random.standard_gamma(smoothness, _NUM_WAVES, np.float32) / smoothness + 0.01
    phases = 2 * math.pi * random.random(_NUM_WAVES, np.float32)
    return np.cos(x @ (frequencies / np.sqrt(scales)) + phases) @ habits.normal(_NUM_WAVES, width)


def _trees(habits: _Habits, x: np.ndarray, width: int) -> np.ndarray:
    """Sums oblivious decision trees, whose splits compare an input with its value in a random row."""
    random, num_trees = habits.random, habits.integer("trees", 1, _MOST_TREES)
    depth = habits.integer("depth", 1, _MOST_DEPTH)
    inputs = habits.chosen(np.abs(habits.weights(x.shape[1])), num_trees, depth)
    answers = x[:, inputs] > x[random.integers(len(x), size=inputs.shape), inputs]
    leaf = answers @ 2 ** np.arange(depth)
    return habits.normal(num_trees, 2**depth, width)[np.arange(num_trees), leaf].sum(axis=1)


def _nearest(habits: _Habits, x: np.ndarray, width: int) -> np.ndarray:
    """Returns random values that depend on which of a few random rows is the nearest."""
    centres = x[habits.random.integers(len(x), size=habits.integer("centres", 2, _MOST_CENTRES))]
    distance = np.square(centres).sum(axis=1) - 2 * x @ centres.T
    return habits.normal(len(centres), width)[distance.argmin(axis=1)]


def _product(habits: _Habits, x: np.ndarray, width: int) -> np.ndarray:
    return _gaussian_process(habits, x, width) * _linear(habits, x, width)


_FUNCTIONS: tuple[_Function, ...] = (
    _linear,
    _quadratic,
    _network,
    _network,
    _gaussian_process,
    _gaussian_process,
    _trees,
    _trees,
    _nearest,
    _product,
)
