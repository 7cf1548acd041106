"""Root causes of a synthetic table: independent or correlated numbers, and categories."""

import torch
from torch import Tensor

from data.tabular.prior.randomness import TableRandom, products

_MOST_LEVELS = 20
_NUM_FACTORS = 4


def draw_causes(random: TableRandom, num_causes: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the causes twice, (G, num_causes, num_rows) each: as inputs of the causal model, and as columns.

    For a category, the column contains codes, and the input of the causal model is a number that depends on the code.
    """
    z = _correlated(random, random.normal(num_causes, num_rows))
    uniform = torch.special.ndtr(z)
    # Below 1/4 the column is normal, below 1/2 uniform, else categorical. Some tables have numeric columns only.
    column = torch.where(random.chance(0.4, 1), random.between(0, 0.35, 1), random.uniform(num_causes))[..., None]
    levels = random.integer(2, _MOST_LEVELS, num_causes, 1)
    # With skew, the distribution of categories is not uniform.
    skew = random.uniform(num_causes, 1) * random.chance(0.5, num_causes, 1)
    code = (uniform * (1 - skew * (1 - uniform.square())) * levels).long().minimum(levels - 1)
    effects = random.normal(num_causes, _MOST_LEVELS)
    is_ordered = random.chance(0.3, num_causes, 1)
    effect = torch.where(is_ordered, code * (2 / levels), effects.gather(2, code))
    is_category = column >= 0.5
    number = torch.where(column < 0.25, z, 2 * uniform)
    # In half of the tables some causes have much larger scales than others.
    scale = random.between(-2, 2, num_causes, 1).mul(random.chance(0.5, 1, 1)).exp()
    return torch.where(is_category, effect, number) * scale, torch.where(is_category, code.float(), number)


def _correlated(random: TableRandom, z: Tensor) -> Tensor:
    """Correlates causes in half of the tables through a few hidden factors; each cause remains standard normal."""
    num_causes, num_rows = z.shape[1:]
    loadings = random.normal(num_causes, _NUM_FACTORS) * random.chance(0.5, 1, 1)
    total = (1 + loadings.square().sum(2, keepdim=True)).rsqrt()
    return (z + products(loadings, random.normal(_NUM_FACTORS, num_rows))) * total
