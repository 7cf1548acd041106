"""Units (hidden variables) of a layered causal model, computed for all rows of a table.

A layer is a random network layer (TabPFN, arXiv 2207.01848, 3.3) or a layer of random trees (similar to TabICL, arXiv
2502.05564, which fits trees to noise).

Tables of a batch are computed together, but no bit of a table depends on the other tables: sizes are padded to a common
size, sums run along the last dimension, and matrix products are computed table by table.
"""

import math

import torch
from torch import Tensor

from data.tabular.prior.activations import apply, draw_activations
from data.tabular.prior.randomness import TableRandom, products
from data.tabular.prior.structure import NUM_LAYERS, NUM_TREE_LAYERS, Structure

_TINY = 1e-8
_STRIDE = 7
_NUM_TREES, _TREE_DEPTH = 3, 3


def standardise(x: Tensor) -> Tensor:
    """Standardises x along the last dimension; constant values become 0."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + _TINY).rsqrt()


def taken(x: Tensor, numbers: Tensor) -> Tensor:
    """Selects units of x (G, U, T) by their indices (G, n), and returns (G, n, T)."""
    first = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1])[:, None]
    return x.reshape(-1, x.shape[2]).index_select(0, (numbers + first).flatten()).view(*numbers.shape, x.shape[2])


def draw_units(random: TableRandom, structure: Structure, causes: Tensor, width: int) -> Tensor:
    """Computes all units from causes, (G, C, T), which are the first units of block 0.

    Returns (G, (NUM_LAYERS + 1) * width, T), with arbitrary values for units that a table does not use.
    """
    num_tables, num_causes, num_rows = causes.shape
    num_networks = num_tables - int(structure.is_tree.sum())
    noise = _noise(random, width, num_rows)
    blocks = torch.empty(num_tables, NUM_LAYERS + 1, width, num_rows)
    blocks[:, 0, :num_causes], blocks[:, 0, num_causes:] = causes, 0
    for part, add_layers in ((slice(num_networks), _add_network), (slice(num_networks, None), _add_trees)):
        if len(blocks[part]):
            add_layers(random.of(part), structure.of(part), blocks[part], noise[part])
    return blocks.flatten(1, 2)


def _noise(random: TableRandom, width: int, num_rows: int) -> Tensor:
    """Draws noise for the units of all layers: (G, NUM_LAYERS, width, T).

    The noise of each unit is a different slice of one random sequence. Noise is independent within a row. Rows share
    noise values, which a model cannot detect because the order of rows is random.
    """
    num_windows = NUM_LAYERS * width
    sequence = random.normal((num_windows - 1) * _STRIDE + num_rows) * random.log_between(1e-4, 0.5, 1)
    return sequence.unfold(1, num_rows, _STRIDE).unflatten(1, (NUM_LAYERS, width))


def _add_network(random: TableRandom, structure: Structure, blocks: Tensor, noise: Tensor) -> None:
    """Fills blocks (G, NUM_LAYERS + 1, width, T) with network layers: activation, weighted sum and noise."""
    weights = _weights(random, structure, blocks.shape[2])
    functions = draw_activations(random, NUM_LAYERS - 1)
    x = blocks[:, 0]
    for layer in range(NUM_LAYERS):
        num_tables = int((structure.depth > layer).sum())
        x = x[:num_tables]
        if layer > 0:
            x = apply(functions[:num_tables, layer - 1], standardise(x))
        x = products(weights[:num_tables, layer], x) + noise[:num_tables, layer]
        blocks[:num_tables, layer + 1] = x


def _weights(random: TableRandom, structure: Structure, width: int) -> Tensor:
    """Draws weights (G, NUM_LAYERS, width, width); the last dimension indexes inputs.

    In half of the tables, weights between different groups of units are 0; in the other half, small weights are 0. A
    unit's weight vector has norm 1.
    """
    weights = random.normal(NUM_LAYERS, width, width)
    unit = torch.arange(width)
    num_inputs = structure.num_units.repeat(1, NUM_LAYERS)
    num_inputs[:, 0] = structure.num_causes[:, 0]
    in_blocks = random.chance(0.5, 1)
    num_blocks = torch.where(in_blocks, random.integer(1, 4, 1), 1)[..., None]
    to_block = unit * num_blocks // structure.num_units[..., None]
    from_block = unit * num_blocks // num_inputs[..., None]
    from_block.masked_fill_(unit >= num_inputs[..., None], -1)
    # The absolute value of a normal number is below sqrt(2) erfinv(p) with probability p.
    threshold = torch.where(in_blocks, 0, random.between(0, 0.9, 1).erfinv() * math.sqrt(2))[..., None, None]
    weights *= (to_block[..., None] == from_block[:, :, None]) & (weights.abs() >= threshold)
    return weights.mul_((weights.square().sum(-1, keepdim=True) + _TINY).rsqrt_())


def _add_trees(random: TableRandom, structure: Structure, blocks: Tensor, noise: Tensor) -> None:
    """Fills the blocks of layers with sums of oblivious trees, in which all nodes of a level have the same split.

    A split compares an input with its value in a random row. The trees of a layer choose from a common set of splits.
    """
    width, num_rows = blocks.shape[2:]
    num_trees, num_questions = width * _NUM_TREES, 2 * width
    leaves = random.normal(NUM_TREE_LAYERS, num_trees, 2**_TREE_DEPTH)
    # Fewer trees or fewer splits make simpler functions.
    leaves *= torch.arange(num_trees)[:, None] < width * random.integer(1, _NUM_TREES, 1)[..., None, None]
    is_asked = torch.arange(_TREE_DEPTH)[:, None] < random.integer(1, _TREE_DEPTH, 1, num_trees)
    num_inputs = structure.num_causes
    for layer in range(NUM_TREE_LAYERS):
        num_tables = int((structure.depth > layer).sum())
        unit = random.integer(0, num_inputs - 1, num_questions)[:num_tables]
        row = random.integer(0, num_rows - 1, num_questions, 1)[:num_tables]
        inputs = taken(blocks[:num_tables, layer], unit)
        answers = torch.zeros(num_tables, num_questions + 1, num_rows, dtype=torch.uint8)  # the last answer is always 0
        answers[:, :-1] = inputs > inputs.gather(2, row)
        asked = random.integer(0, num_questions - 1, _TREE_DEPTH, num_trees).where(is_asked, num_questions)
        leaf = torch.zeros(num_tables, num_trees, num_rows, dtype=torch.uint8)
        for question in asked[:num_tables].unbind(1):
            leaf = leaf.mul_(2).add_(taken(answers, question))
        values = leaves[:num_tables, layer].gather(2, leaf.long()).view(num_tables, _NUM_TREES, width, num_rows).sum(1)
        blocks[:num_tables, layer + 1] = standardise(values) + noise[:num_tables, layer]
        num_inputs = structure.num_units
