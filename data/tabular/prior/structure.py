"""Structure of a table's causal model: causes, layers, units, and which units become columns and classes.

Units are numbered through all blocks: block 0 has the causes, block l the units of layer l, each `width` units of which
a table uses the first ones.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from data.tabular.prior.randomness import KIND_STREAM, TableRandom, padded
from trainer.loading.counter_random import uniform

NUM_LAYERS = 4
"""Maximum depth."""
NUM_TREE_LAYERS = 2
NUM_CLASS_UNITS = 10
"""Candidate units per table for its classes; the first may suffice."""
MOST_CAUSES = 10
"""Limit for a causal model; other models have one per column."""


def width_of(num_features: int) -> int:
    """Returns units per block: enough for features and class units of the shallowest model, at least 32."""
    return padded(max(num_features + NUM_CLASS_UNITS, 32))


def most_causes(num_features: int) -> int:
    """Returns the causes drawn for every table, used or not."""
    return padded(max(num_features, MOST_CAUSES))


@dataclass(frozen=True)
class Structure:
    """Structures of G tables, all (G, 1) but the last two. Networks precede trees; within both, deeper ones come first.

    num_causes: real units of block 0. num_units: of the other blocks. depth: number of layers.
    is_tree: units are sums of trees rather than weighted sums of a network.
    is_causal: columns are units of any layer; otherwise they are the causes.
    features: (G, m), class_units: (G, NUM_CLASS_UNITS), unit numbers.
    """

    num_causes: Tensor
    num_units: Tensor
    depth: Tensor
    is_tree: Tensor
    is_causal: Tensor
    features: Tensor
    class_units: Tensor

    def of(self, part: slice) -> "Structure":
        """Selects some of the tables."""
        return Structure(*(getattr(self, field.name)[part] for field in fields(self)))


def draw_kinds(seed: int, numbers: np.ndarray, attempt: int, tree_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Draws is_tree (G,) bool and depth (G,) int64 for tables (G,) in any order.

    Nearly half of the networks have one layer: targets below many random layers are rarely predictable.
    """
    kind, depth = uniform(seed, attempt, numbers, (2,), KIND_STREAM).T
    is_tree = kind < tree_share
    return is_tree, (depth**2 * np.where(is_tree, NUM_TREE_LAYERS, NUM_LAYERS)).astype(np.int64) + 1


def draw_structure(random: TableRandom, is_tree: Tensor, depth: Tensor, num_features: int) -> Structure:
    """Draws the rest of the structures, for a number of columns; is_tree, depth: (G, 1), in the order above."""
    width = width_of(num_features)
    is_causal = random.chance(0.5, 1)
    fewest = torch.where(is_causal, -(-(num_features + NUM_CLASS_UNITS) // depth), 4).clamp(min=4)
    num_units = (fewest * (width / fewest).log().mul(random.uniform(1)).exp()).long().clamp(max=width)
    num_causes = torch.where(is_causal, random.log_between(2, MOST_CAUSES + 1, 1).long(), num_features)
    is_effect = random.chance(0.5, 1) | ~is_causal
    block = torch.where(is_effect, depth, random.integer(1, depth, 1))
    class_units = block * width + random.integer(0, num_units - 1, NUM_CLASS_UNITS)
    features = torch.where(
        is_causal, _units_to_see(random, num_features, width, depth, num_units, class_units), torch.arange(num_features)
    )
    return Structure(num_causes, num_units, depth, is_tree, is_causal, features, class_units)


def _units_to_see(
    random: TableRandom, num_features: int, width: int, depth: Tensor, num_units: Tensor, class_units: Tensor
) -> Tensor:
    """Draws columns of a causal model: adjacent units in half of the tables, otherwise any but the class units."""
    unit = torch.arange(width)
    block = torch.arange(NUM_LAYERS + 1)[:, None]
    rank = ((block - 1) * num_units[..., None] + unit).flatten(1)
    is_real = ((block >= 1) & (block <= depth[..., None]) & (unit < num_units[..., None])).flatten(1)
    num_real = depth * num_units
    start = (random.uniform(1) * num_real).long()
    distance = (rank - start) % num_real / num_real
    key = torch.where(random.chance(0.5, 1), distance, random.uniform(rank.shape[1]))
    key = key.scatter_add(1, class_units, torch.ones(class_units.shape)).masked_fill(~is_real, float("inf"))
    nearest = key.sort(dim=1, stable=True).indices[:, :num_features]
    columns = random.uniform(num_features).argsort(dim=1, stable=True)
    return nearest.gather(1, columns)
