"""Computes all units of a causal model, for all rows.

A random network (TabPFN, arXiv 2207.01848, 3.3) or random trees (TabICL, arXiv 2502.05564, which fits them to noise).

All tables are computed together, but each must not depend on the others, to the bit: sizes are padded to those of the
shape, sums run along the last dimension, and matrix products are computed per table.
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
    """Standardises along the last dimension; constants become 0."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + _TINY).rsqrt()


def taken(x: Tensor, numbers: Tensor) -> Tensor:
    """Selects rows of x (G, U, T) by numbers (G, n): (G, n, T)."""
    first = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1])[:, None]
    return x.reshape(-1, x.shape[2]).index_select(0, (numbers + first).flatten()).view(*numbers.shape, x.shape[2])


def draw_units(random: TableRandom, structure: Structure, causes: Tensor, width: int) -> Tensor:
    """causes: (G, C, T), the first units of block 0. Returns (G, (NUM_LAYERS + 1) * width, T); unused units are
    arbitrary.
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

    Each unit sees another window of one sequence, independent within a row; reuse across rows is undetectable, since
    rows have no order.
    """
    num_windows = NUM_LAYERS * width
    sequence = random.normal((num_windows - 1) * _STRIDE + num_rows) * random.log_between(1e-4, 0.5, 1)
    return sequence.unfold(1, num_rows, _STRIDE).unflatten(1, (NUM_LAYERS, width))


def _add_network(random: TableRandom, structure: Structure, blocks: Tensor, noise: Tensor) -> None:
    """Fills the blocks (G, NUM_LAYERS + 1, width, T) after the first: a function of each unit, weights, noise."""
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
    """(G, NUM_LAYERS, width, width), to and from. Drops small weights, or all between blocks of units.

    A unit's weights have length 1, so its values have about variance 1 beside the noise.
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
    # a normal number is smaller than sqrt(2) erfinv(p) with probability p
    threshold = torch.where(in_blocks, 0, random.between(0, 0.9, 1).erfinv() * math.sqrt(2))[..., None, None]
    weights *= (to_block[..., None] == from_block[:, :, None]) & (weights.abs() >= threshold)
    return weights.mul_((weights.square().sum(-1, keepdim=True) + _TINY).rsqrt_())


def _add_trees(random: TableRandom, structure: Structure, blocks: Tensor, noise: Tensor) -> None:
    """Fills the blocks with sums of oblivious trees per unit: all nodes of a level ask one question.

    A question compares an input with its value in a random row; the trees of a layer share a bank of questions.
    """
    width, num_rows = blocks.shape[2:]
    num_trees, num_questions = width * _NUM_TREES, 2 * width
    leaves = random.normal(NUM_TREE_LAYERS, num_trees, 2**_TREE_DEPTH)
    # fewer trees, or fewer questions, make simpler functions
    leaves *= torch.arange(num_trees)[:, None] < width * random.integer(1, _NUM_TREES, 1)[..., None, None]
    is_asked = torch.arange(_TREE_DEPTH)[:, None] < random.integer(1, _TREE_DEPTH, 1, num_trees)
    num_inputs = structure.num_causes
    for layer in range(NUM_TREE_LAYERS):
        num_tables = int((structure.depth > layer).sum())
        unit = random.integer(0, num_inputs - 1, num_questions)[:num_tables]
        row = random.integer(0, num_rows - 1, num_questions, 1)[:num_tables]
        inputs = taken(blocks[:num_tables, layer], unit)
        answers = torch.zeros(num_tables, num_questions + 1, num_rows, dtype=torch.uint8)  # the last is always no
        answers[:, :-1] = inputs > inputs.gather(2, row)
        asked = random.integer(0, num_questions - 1, _TREE_DEPTH, num_trees).where(is_asked, num_questions)
        leaf = torch.zeros(num_tables, num_trees, num_rows, dtype=torch.uint8)
        for question in asked[:num_tables].unbind(1):
            leaf = leaf.mul_(2).add_(taken(answers, question))
        values = leaves[:num_tables, layer].gather(2, leaf.long()).view(num_tables, _NUM_TREES, width, num_rows).sum(1)
        blocks[:num_tables, layer + 1] = standardise(values) + noise[:num_tables, layer]
        num_inputs = structure.num_units
