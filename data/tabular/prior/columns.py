"""Converts a causal model's units (hidden variables) to columns of a table."""

import torch
from torch import Tensor

from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.settings import PriorSettings
from data.tabular.prior.units import standardise

MOST_LEVELS = 32
"""Largest number of categories of a column in version 1 of the prior."""
MANY_LEVELS = 128
"""Largest number of categories in version 2 of the prior; the number is log-uniform in a sixth of the columns."""
_MEAN_LEVELS = 10.0
_MOST_DEVIATIONS = 4.0


def draw_columns(random: TableRandom, settings: PriorSettings, units: Tensor) -> Tensor:
    """Converts units to columns, both of shape (G, m, T), with NaN for missing values.

    Random shares of a table's columns become heavy-tailed, clipped from below, rounded, categorical, unrelated to other
    columns, constant, or incomplete.
    """
    num_features = units.shape[1]
    shares = torch.tensor([0.25, 0.15, 0.25, settings.categorical_share, 0.25, 0.03, settings.missing_share])
    most = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5, 0.3, 1.0])
    rates = random.between(0, most, len(most)) * random.chance(shares, len(most))
    chosen = random.chance(rates[..., None], len(most), num_features)[..., None]
    has_tail, has_floor, is_rounded, is_categorical, is_unrelated, is_constant, has_gaps = chosen.unbind(1)
    x = without_outliers(standardise(units))
    x = torch.where(has_tail, (x * random.log_between(0.3, 2.0, num_features, 1)).exp(), x)
    x = torch.where(has_floor, x.maximum(_in_random_rows(random, x)), x)
    step = random.log_between(0.1, 2.0, num_features, 1)
    x = torch.where(is_rounded, (x / step).round(), x)
    x = _with_categories(random, x, is_categorical, settings.version)
    x = torch.where(is_unrelated, _rolled(random, x), x).masked_fill_(is_constant, 1.0)
    return x.masked_fill_(_missing(random, x, has_gaps, settings.version), float("nan"))


def without_outliers(x: Tensor) -> Tensor:
    """Clips standardised columns, (..., T), at 4 standard deviations from the mean and standardises them again.

    Mean and deviation are computed from a copy that is clipped to [-4, 4].
    """
    inner = x.clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)
    mean = inner.mean(-1, keepdim=True)
    reach = _MOST_DEVIATIONS * (inner - mean).square().mean(-1, keepdim=True).sqrt()
    return standardise(x.clamp(mean - reach, mean + reach))


def _in_random_rows(random: TableRandom, x: Tensor) -> Tensor:
    """Returns, for each column of x, (G, m, T), its value in a row drawn for this column: (G, m, 1)."""
    return x.gather(2, random.integer(0, x.shape[2] - 1, x.shape[1], 1))


def _with_categories(random: TableRandom, x: Tensor, chosen: Tensor, version: int) -> Tensor:
    """Converts chosen columns to codes of categories, which are intervals between values of random rows.

    chosen: (G, m, 1) bool. In most tables the codes are shuffled; in the others they follow the order of the intervals.
    """
    num_features, num_rows = x.shape[1:]
    most = MOST_LEVELS if version == 1 else MANY_LEVELS
    levels = (-_MEAN_LEVELS * (1 - random.uniform(num_features, 1)).log()).round().clamp(2, MOST_LEVELS)
    if version > 1:
        many = random.log_between(2, most, num_features, 1).round()
        levels = torch.where(random.chance(1 / 6, num_features, 1), many, levels)
    row = random.integer(0, num_rows - 1, num_features, most - 1)
    key = random.uniform(num_features, most)
    is_ordered = random.chance(0.3, 1, 1).expand(-1, num_features, -1)
    levels, row, key, is_ordered, values = (part[chosen[..., 0]] for part in (levels, row, key, is_ordered, x))
    bounds = values.gather(1, row).masked_fill_(torch.arange(1, most) >= levels, float("inf"))
    codes = torch.searchsorted(bounds.sort(1).values, values, right=True)
    order = key.add(torch.arange(most) >= levels).argsort(dim=1, stable=True)
    return x.masked_scatter(chosen, torch.where(is_ordered, codes, order.gather(1, codes)).float())


def _rolled(random: TableRandom, x: Tensor) -> Tensor:
    """Shifts each column cyclically, which keeps its distribution but makes it unrelated to other columns."""
    num_rows = x.shape[2]
    shift = random.integer(1, num_rows - 1, x.shape[1], 1)
    return x.gather(2, (torch.arange(num_rows) + shift) % num_rows)


def _missing(random: TableRandom, x: Tensor, may: Tensor, version: int) -> Tensor:
    """Chooses missing cells, (G, m, T) bool, at random, or only where the value exceeds the value in a random row.

    In version 2 of the prior, the deciding value may be from another column. may: columns that may have missing cells.
    """
    num_features = x.shape[1]
    rate = 0.6 * random.uniform(num_features, 1).square() * may
    matters = random.chance(0.3, num_features, 1)
    above = x > _in_random_rows(random, x)
    if version > 1:
        above = torch.where(random.chance(0.5, num_features, 1), above, above.roll(1, dims=1))
    return (random.uniform(*x.shape[1:]) < rate) & (above | ~matters)
