"""The values of all units of a causal model, in all rows.

A random network (TabPFN, arXiv 2207.01848, 3.3) or random trees (TabICL, arXiv 2502.05564, which fits them to noise).

All tables are computed together. What a table gets must not depend on which others are there, to the bit, so products
are batched ones of padded sizes, one for each table, and sums run along the last dimension.
"""

import math

import torch
from torch import Tensor

from data.tabular.prior.activations import apply, draw_activations
from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.structure import NUM_LAYERS, NUM_TREE_LAYERS, Structure

_TINY = 1e-8
_ROLL = 7
_NUM_TREES, _TREE_DEPTH = 3, 3


def standardise(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 along the last dimension; where all is equal, 0."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + _TINY).rsqrt()


def draw_units(random: TableRandom, structure: Structure, causes: Tensor, width: int) -> Tensor:
    """causes: (G, C, T), the first units of block 0. Returns (G, (NUM_LAYERS + 1) * width, T); only real ones count."""
    num_tables, num_causes, num_rows = causes.shape
    noise = random.normals(width, num_rows) * random.log_between(1e-4, 0.5, 1)[..., None]
    blocks = torch.empty(num_tables, NUM_LAYERS + 1, width, num_rows)
    blocks[:, 0, :num_causes], blocks[:, 0, num_causes:] = causes, 0
    _add_network(random, structure, blocks, noise)
    _add_trees(random, structure, blocks, noise)
    return blocks.flatten(1, 2)


def _noise_of(noise: Tensor, tables: Tensor, layer: int) -> Tensor:
    """Rows are drawn alike, so the noise of other rows is as good for one more layer as new noise."""
    return noise[tables].roll(layer * _ROLL, 2)


def _add_network(random: TableRandom, structure: Structure, blocks: Tensor, noise: Tensor) -> None:
    """Fills the blocks (G, NUM_LAYERS + 1, width, T) after the first: a function of each unit, weights, noise."""
    weights = _weights(random, structure, blocks.shape[2])
    functions = draw_activations(random, NUM_LAYERS)
    for layer in range(NUM_LAYERS):
        tables = (~structure.is_tree & (structure.depth > layer)).nonzero()[:, 0]
        x = blocks[tables, layer]
        if layer > 0:
            x = apply(functions[tables, layer], standardise(x))
        blocks[tables, layer + 1] = torch.bmm(weights[tables, layer], x) + _noise_of(noise, tables, layer)


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


def _add_trees(random: TableRandom, structure: Structure, blocks: Tensor, noise: Tensor) -> None:
    """The same where each unit is a sum of oblivious trees: all nodes of a level ask one question.

    A question compares an input with its value in a random row.
    """
    width, num_rows = blocks.shape[2:]
    num_trees = width * _NUM_TREES
    questions = random.uniforms(NUM_TREE_LAYERS, 2, num_trees * _TREE_DEPTH)
    leaves = random.normals(NUM_TREE_LAYERS, num_trees, 2**_TREE_DEPTH)
    # With fewer trees, or fewer questions, functions are simpler.
    leaves *= torch.arange(num_trees)[:, None] < width * random.integer(1, _NUM_TREES, 1)[..., None, None]
    num_questions = random.integer(1, _TREE_DEPTH, 1, num_trees)
    for layer in range(NUM_TREE_LAYERS):
        tables = (structure.is_tree & (structure.depth > layer)).nonzero()[:, 0]
        inputs = blocks[tables, layer]
        num_inputs = (structure.num_causes if layer == 0 else structure.num_units)[tables]
        unit = (questions[tables, layer, 0] * num_inputs).long().minimum(num_inputs - 1)
        row = (questions[tables, layer, 1] * num_rows).long().clamp(max=num_rows - 1)
        table = torch.arange(len(tables))[:, None]
        answers = inputs[table, unit] > inputs[table, unit, row][..., None]
        answers = answers.view(len(tables), _TREE_DEPTH, num_trees, num_rows).to(torch.uint8)
        leaf = answers[:, 0]
        for level in range(1, _TREE_DEPTH):
            leaf = leaf + leaf + answers[:, level] * (num_questions[tables] > level).view(-1, num_trees, 1)
        values = leaves[tables, layer].gather(2, leaf.long()).view(len(tables), _NUM_TREES, width, num_rows).sum(1)
        blocks[tables, layer + 1] = standardise(values) + _noise_of(noise, tables, layer)
