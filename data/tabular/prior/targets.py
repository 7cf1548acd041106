"""Classes from the units of a causal model, and which rows are context."""

import torch
from torch import Tensor

from data.tabular.prior.columns import without_outliers
from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.units import standardise


def draw_labels(random: TableRandom, units: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """units: (G, U, T), the first one or all of which decide. Labels (G, T) int64, and the number of classes, (G,).

    Classes are intervals of the first unit, of random shares of the rows or between random values; or the unit that is
    the largest. They have a random order but in some tables. Some tables have wrong labels. A table may fail to
    have two classes.
    """
    num_classes = torch.where(random.chance(0.5, 1), 2, random.integer(2, most, 1))
    units = without_outliers(standardise(units[:, :most]))
    latent = units[:, 0].contiguous()
    kind = random.uniform(1)
    by_rank = _intervals(latent, _rank_bounds(random, latent, num_classes, most), num_classes)
    by_value = _intervals(latent, random.normal(most - 1), num_classes)
    labels = torch.where(kind < 0.3, by_value, _largest(random, units, num_classes))
    is_single = (labels == labels[:, :1]).all(1, keepdim=True)
    labels = torch.where(is_single | (kind > 0.6), by_rank, labels)
    labels, num_classes = _dense(_with_errors(random, labels), most)
    return _permuted(random, labels, num_classes, most), num_classes


def _intervals(latent: Tensor, bounds: Tensor, num_classes: Tensor) -> Tensor:
    """In which interval between the first num_classes - 1 bounds, of any order, a row lies: (G, T)."""
    is_bound = torch.arange(1, bounds.shape[1] + 1) < num_classes
    return torch.searchsorted(bounds.masked_fill(~is_bound, float("inf")).sort(1).values, latent, right=True)


def _rank_bounds(random: TableRandom, latent: Tensor, num_classes: Tensor, most: int) -> Tensor:
    """Quantiles: the shares are powers, 0 to 1.5, of exponential numbers, so between equal and a few rare classes."""
    num_rows = latent.shape[1]
    shares = ((1 - random.uniform(most)).log().neg() + 1e-3).log().mul(random.between(0, 1.5, 1)).exp()
    shares = shares * (torch.arange(most) < num_classes)
    position = shares.cumsum(1)[:, :-1] / shares.sum(1, keepdim=True) * num_rows
    return latent.sort(1).values.gather(1, position.long().clamp(1, num_rows - 1))


def _largest(random: TableRandom, units: Tensor, num_classes: Tensor) -> Tensor:
    """Which of the first units is the largest, after random offsets: (G, T)."""
    offsets = random.normal(units.shape[1]) * random.uniform(1)
    offsets = offsets.masked_fill(torch.arange(units.shape[1]) >= num_classes, float("-inf"))
    return (units + offsets[..., None]).argmax(1)


def _with_errors(random: TableRandom, labels: Tensor) -> Tensor:
    """In a third of the tables some labels are those of other rows."""
    rate = random.between(0, 0.3, 1) * random.chance(0.3, 1)
    num_rows = labels.shape[1]
    other = labels.gather(1, (torch.arange(num_rows) + random.integer(1, num_rows - 1, 1)) % num_rows)
    return torch.where(random.uniform(num_rows) < rate, other, labels)


def _dense(labels: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Renumbers the classes that occur, keeping their order: labels (G, T), and how many there are, (G,)."""
    occurs = torch.zeros(len(labels), most, dtype=torch.int64).scatter_(1, labels, 1)
    return (occurs.cumsum(1) - 1).gather(1, labels), occurs.sum(1)


def _permuted(random: TableRandom, labels: Tensor, num_classes: Tensor, most: int) -> Tensor:
    key = random.uniform(most) + torch.arange(most).ge(num_classes[:, None])
    permutation = key.argsort(dim=1, stable=True)
    return torch.where(random.chance(0.3, 1), labels, permutation.gather(1, labels))


def row_order(random: TableRandom, labels: Tensor, most: int) -> Tensor:
    """The rows of each table shuffled, one of each class in front, so that the context has every class: (G, T)."""
    num_rows = labels.shape[1]
    row = torch.arange(num_rows).expand(labels.shape)
    first = torch.full((len(labels), most), num_rows).scatter_reduce_(1, labels, row, "amin")
    key = random.uniform(num_rows) - (first.gather(1, labels) == row).float()
    return key.argsort(dim=1, stable=True)
