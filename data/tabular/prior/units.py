"""The values of all units of a causal model, in all rows: a random network (TabPFN, arXiv 2207.01848, 3.3).

All tables are computed together. What a table gets must not depend on which others are there, to the bit, so products
are batched ones of padded sizes, one for each table, and sums run along the last dimension.
"""

import math

import torch
from torch import Tensor

from data.tabular.prior.activations import apply, draw_activations
from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.structure import NUM_LAYERS, Structure

_TINY = 1e-8
_ROLL = 7


def standardise(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 along the last dimension; where all is equal, 0."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + _TINY).rsqrt()


def network_units(random: TableRandom, structure: Structure, causes: Tensor, width: int) -> Tensor:
    """causes: (G, C, T), the first units of block 0. Returns (G, (NUM_LAYERS + 1) * width, T).

    Block by block: a random function of each unit, standardised, then random weights and noise.
    """
    num_tables, num_causes, num_rows = causes.shape
    weights = _weights(random, structure, width)
    functions = draw_activations(random, NUM_LAYERS)
    noise = random.normals(width, num_rows) * random.log_between(1e-4, 0.5, 1)[..., None]
    blocks = torch.empty(num_tables, NUM_LAYERS + 1, width, num_rows)
    blocks[:, 0, :num_causes], blocks[:, 0, num_causes:] = causes, 0
    for layer in range(NUM_LAYERS):
        used = (structure.depth[:, 0] > layer).nonzero()[:, 0]
        x = blocks[used, layer]
        if layer > 0:
            x = apply(functions[used, layer], standardise(x))
        # Rows are drawn alike, so the noise of other rows is as good as new one.
        blocks[used, layer + 1] = torch.bmm(weights[used, layer], x) + noise[used].roll(layer * _ROLL, 2)
    return blocks.flatten(1, 2)


def _weights(random: TableRandom, structure: Structure, width: int) -> Tensor:
    """(G, NUM_LAYERS, width, width), to and from. Small ones are dropped, or all between blocks of units.

    Those of a unit have length 1, so that its values have about variance 1 beside the noise.
    """
    weights = random.normals(NUM_LAYERS, width, width)
    unit = torch.arange(width)
    num_inputs = structure.num_units.repeat(1, NUM_LAYERS)
    num_inputs[:, :1] = structure.num_causes
    kept = unit < num_inputs[:, :, None, None]
    # A normal number is smaller than sqrt(2) erfinv(p) with probability p.
    threshold = random.between(0, 0.9, 1).erfinv()[:, :, None, None] * math.sqrt(2)
    num_blocks = random.integer(1, 4, 1)[:, :, None, None]
    of_block = unit[:, None] * num_blocks // structure.num_units[:, :, None, None] == (
        unit * num_blocks // num_inputs[:, :, None, None]
    )
    kept = kept & torch.where(random.chance(0.5, 1)[:, :, None, None], weights.abs() >= threshold, of_block)
    weights *= kept
    return weights * (weights.square().sum(-1, keepdim=True) + _TINY).rsqrt()
