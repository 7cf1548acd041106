"""What becomes of units when they are seen as the columns of a table."""

from torch import Tensor

from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.settings import PriorSettings
from data.tabular.prior.units import standardise

_MOST_DEVIATIONS = 4.0


def draw_columns(random: TableRandom, settings: PriorSettings, units: Tensor) -> Tensor:
    """units: (G, m, T). Returns the columns (G, m, T)."""
    return without_outliers(standardise(units))


def without_outliers(x: Tensor) -> Tensor:
    """Clips standardised columns at 4 standard deviations of what lies within 4; standardises again."""
    inner = x.clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)
    mean = inner.mean(-1, keepdim=True)
    reach = _MOST_DEVIATIONS * (inner - mean).square().mean(-1, keepdim=True).sqrt()
    return standardise(x.clamp(mean - reach, mean + reach))
