"""Structure of a table's causal model.

Units form blocks of `width` units: causes are in block 0, and units of layer l in block l. A table uses the first units
of each block. Unit i of block b has the index b * width + i.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from data.tabular.prior.randomness import KIND_STREAM, TableRandom, padded
from trainer.loading.counter_random import uniform

NUM_LAYERS = 4
"""Largest number of layers of a network."""
NUM_TREE_LAYERS = 2
NUM_CLASS_UNITS = 10
"""Number of units per table from which classes are derived; some tables use only the first unit."""
MOST_CAUSES = 10
"""Largest number of causes of a table whose columns are units of layers; in other tables, all columns are causes."""


def width_of(num_features: int) -> int:
    """Returns the number of units per block: at least 32, and enough for columns and classes of a one-layer model."""
    return padded(max(num_features + NUM_CLASS_UNITS, 32))


def most_causes(num_features: int) -> int:
    """Returns the number of causes drawn for every table; a table may use fewer."""
    return padded(max(num_features, MOST_CAUSES))


@dataclass(frozen=True)
class Structure:
    """Structures of G tables, sorted: networks before trees, and within each kind deeper models first.

    num_causes: (G, 1), number of causes. num_units: (G, 1), number of units per layer. depth: (G, 1), number of layers.
    is_tree: (G, 1), whether units are sums of trees rather than weighted sums of a network.
    is_causal: (G, 1), whether columns are units of the layers rather than causes.
    features: (G, m), indices of the units that become columns.
    class_units: (G, NUM_CLASS_UNITS), indices of the units from which classes are derived.
    """

    num_causes: Tensor
    num_units: Tensor
    depth: Tensor
    is_tree: Tensor
    is_causal: Tensor
    features: Tensor
    class_units: Tensor

    def of(self, part: slice) -> "Structure":
        return Structure(*(getattr(self, field.name)[part] for field in fields(self)))


def draw_kinds(seed: int, numbers: np.ndarray, attempt: int, tree_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Draws is_tree (bool) and depth (int64) of the tables with indices `numbers`; all have shape (G,).

    Half of the networks have one layer, because targets after many random layers are rarely predictable.
    """
    kind, depth = uniform(seed, attempt, numbers, (2,), KIND_STREAM).T
    is_tree = kind < tree_share
    return is_tree, (depth**2 * np.where(is_tree, NUM_TREE_LAYERS, NUM_LAYERS)).astype(np.int64) + 1


def draw_structure(random: TableRandom, is_tree: Tensor, depth: Tensor, num_features: int) -> Structure:
    """Draws structures, given is_tree and depth of shape (G, 1), which must be sorted as in `Structure`."""
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
    """Draws the units that become columns: neighbouring units in half of the tables, random units in the other half.

    Class units are chosen only if there are too few other units.
    """
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
