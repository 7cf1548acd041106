"""Derives classes from a causal model's units (hidden variables), and chooses context rows."""

import math

import numpy as np
import torch
from torch import Tensor

from data.tabular.prior.columns import without_outliers
from data.tabular.prior.randomness import TableRandom, products
from data.tabular.prior.units import standardise

_MOST_PROTOTYPES = 32


def draw_labels(random: TableRandom, units: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Derives labels (G, T) and each table's number of classes (G,) from units (G, U, T).

    Classes are intervals of the first unit, indices of the largest unit, or regions around one to three rows each.
    Class numbers are shuffled in 70 % of the tables; some labels are wrong in 30 %. A table may have a single class.
    """
    num_classes = torch.where(random.chance(0.5, 1), 2, random.integer(2, most, 1))
    kind = random.uniform(1)
    latent = without_outliers(standardise(units[:, :1]))[:, 0]
    in_order = latent.sort(1).values
    bounds = torch.where(kind < 0.3, random.normal(most - 1), _quantiles(random, in_order, num_classes, most))
    # Bounds between the smallest and the largest value give at least two classes.
    bounds = bounds.clamp(in_order[:, 1:2], in_order[:, -1:])
    bounds = bounds.masked_fill_(torch.arange(1, most) >= num_classes, float("inf")).sort(1).values
    labels = torch.searchsorted(bounds, latent, right=True)
    offsets = random.normal(most) * random.uniform(1)
    rows = random.integer(0, latent.shape[1] - 1, _MOST_PROTOTYPES)
    num_prototypes = num_classes * random.integer(1, 3, 1)
    is_nearest = random.chance(0.5, 1)
    tables = (kind > torch.where(num_classes > 2, 0.5, 0.7))[:, 0].nonzero()[:, 0]
    units = standardise(units[tables, :most])
    largest = _largest(units, offsets[tables], num_classes[tables])
    nearest = _nearest(units, rows[tables], num_prototypes[tables]) % num_classes[tables]
    regions = torch.where(is_nearest[tables], nearest, largest)
    is_single = (regions == regions[:, :1]).all(1, keepdim=True)
    labels[tables] = torch.where(is_single, labels[tables], regions)
    labels, num_classes = _dense(_with_errors(random, labels), most)
    return _permuted(random, labels, num_classes, most), num_classes


_NUM_FERNS, _FERN_DEPTH = 64, 4
_LEAST_GAIN = 3.0
"""Minimum gain in mean log-likelihood of the queries over predicting class frequencies, in standard errors."""


def is_predictable(rows: np.ndarray, labels: np.ndarray, num_context: int, key: tuple[int, int, int]) -> bool:
    """Returns whether random ferns fitted to the context predict the queries better than class frequencies do.

    A fern is an oblivious decision tree with random splits (Ozuysal et al., 2010). rows: (T, m), NaN where missing.
    labels: (T,). key: seed of the splits.
    """
    random = np.random.default_rng([abs(part) for part in key])
    column = random.integers(rows.shape[1], size=(_NUM_FERNS, _FERN_DEPTH))
    bound = rows[random.integers(num_context, size=column.shape), column]
    with np.errstate(invalid="ignore"):
        leaf = (rows[:, column] > bound) @ 2 ** np.arange(_FERN_DEPTH)
    leaf += 2**_FERN_DEPTH * np.arange(_NUM_FERNS)
    one_hot = (labels[:, None] == np.arange(labels.max() + 1)).astype(float)
    known, shares = one_hot[:num_context], one_hot[:num_context].mean(axis=0)
    counts = np.stack(
        [
            np.bincount(leaf[:num_context].ravel(), np.repeat(of_class, _NUM_FERNS), _NUM_FERNS * 2**_FERN_DEPTH)
            for of_class in known.T
        ],
        axis=1,
    )
    likely = ((counts + shares) / (counts.sum(axis=1, keepdims=True) + 1))[leaf[num_context:]].mean(axis=1)
    truth = labels[num_context:]
    gain = np.log(likely[np.arange(len(truth)), truth] / shares[truth])
    return bool(gain.mean() > _LEAST_GAIN * gain.std() / math.sqrt(len(gain)))


def _quantiles(random: TableRandom, in_order: Tensor, num_classes: Tensor, most: int) -> Tensor:
    """Draws bounds such that class sizes are proportional to random exponential numbers raised to a random power."""
    num_rows = in_order.shape[1]
    shares = ((1 - random.uniform(most)).log().neg() + 1e-3).log().mul(random.between(0, 1.5, 1)).exp()
    shares = shares * (torch.arange(most) < num_classes)
    position = shares.cumsum(1)[:, :-1] / shares.sum(1, keepdim=True) * num_rows
    return in_order.gather(1, position.long().clamp(max=num_rows - 1))


def _largest(units: Tensor, offsets: Tensor, num_classes: Tensor) -> Tensor:
    """Adds offsets (G, U) to units (G, U, T); returns which of the first num_classes units is the largest: (G, T)."""
    offsets = offsets.masked_fill(torch.arange(units.shape[1]) >= num_classes, float("-inf"))
    return (units + offsets[..., None]).argmax(1)


def _nearest(units: Tensor, rows: Tensor, num_prototypes: Tensor) -> Tensor:
    """Returns the index of each row's nearest prototype: (G, T). Prototypes are the first num_prototypes of `rows`."""
    prototypes = units.gather(2, rows[:, None, :].expand(-1, units.shape[1], -1)).transpose(1, 2).contiguous()
    closeness = products(prototypes, units) - prototypes.square().sum(2, keepdim=True) / 2
    is_used = torch.arange(_MOST_PROTOTYPES)[:, None] < num_prototypes[..., None]
    return closeness.masked_fill_(~is_used, float("-inf")).argmax(1)


def _with_errors(random: TableRandom, labels: Tensor) -> Tensor:
    """Replaces some labels with labels of other rows, in 30 % of the tables."""
    rate = random.between(0, 0.3, 1) * random.chance(0.3, 1)
    num_rows = labels.shape[1]
    other = labels.gather(1, (torch.arange(num_rows) + random.integer(1, num_rows - 1, 1)) % num_rows)
    return torch.where(random.uniform(num_rows) < rate, other, labels)


def _dense(labels: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Renumbers the classes that occur, in order; returns labels (G, T) and each table's number of classes (G,)."""
    occurs = torch.zeros(len(labels), most, dtype=torch.int64).scatter_(1, labels, 1)
    return (occurs.cumsum(1) - 1).gather(1, labels), occurs.sum(1)


def _permuted(random: TableRandom, labels: Tensor, num_classes: Tensor, most: int) -> Tensor:
    key = random.uniform(most) + torch.arange(most).ge(num_classes[:, None])
    permutation = key.argsort(dim=1, stable=True)
    return torch.where(random.chance(0.3, 1), labels, permutation.gather(1, labels))


def row_order(random: TableRandom, labels: Tensor, most: int) -> Tensor:
    """Returns a random order of each table's rows, (G, T), that starts with one row of each class for the context."""
    num_rows = labels.shape[1]
    row = torch.arange(num_rows).expand(labels.shape)
    first = torch.full((len(labels), most), num_rows).scatter_reduce_(1, labels, row, "amin")
    key = random.uniform(num_rows) - (first.gather(1, labels) == row).float()
    return key.argsort(dim=1, stable=True)
