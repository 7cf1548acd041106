"""Tests units of causal models against a computation of one unit after another in float64."""

import numpy as np
import pytest
import torch

from data.tabular.prior.activations import NUM_CELLS, REACH, draw_activations
from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.structure import (
    MOST_CAUSES,
    NUM_LAYERS,
    NUM_TREE_LAYERS,
    Structure,
    draw_kinds,
    draw_structure,
    most_causes,
    width_of,
)
from data.tabular.prior.units import _add_network, _add_trees, _weights

NUM_ROWS = 48


def structures(num_tables: int, num_features: int, tree_share: float) -> Structure:
    """Draws structures in the order of `tables.py`: networks before trees, deep ones first."""
    numbers = np.arange(num_tables)
    is_tree, depth = draw_kinds(0, numbers, 0, tree_share)
    order = np.lexsort((-depth, is_tree))
    kinds = (torch.from_numpy(is_tree[order, None]), torch.from_numpy(depth[order, None]))
    return draw_structure(TableRandom(0, numbers[order], 0), *kinds, num_features)


def random() -> TableRandom:
    """Returns the same random source at each call."""
    return TableRandom(9, np.arange(40), 0)


def drawn_blocks(structure: Structure, num_features: int, noise_std: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tables, layers + 1, width, rows) with causes in the first block, and the noise of the layers."""
    source, width = TableRandom(1, np.arange(40), 0), width_of(num_features)
    blocks = torch.zeros(40, NUM_LAYERS + 1, width, NUM_ROWS)
    blocks[:, 0, : most_causes(num_features)] = source.normal(most_causes(num_features), NUM_ROWS)
    return blocks, noise_std * source.normal(NUM_LAYERS, width, NUM_ROWS)


@pytest.mark.parametrize("num_features", [1, 3, 9, 22, 50])
def test_sampled_structures_are_valid(num_features):
    structure, width = structures(300, num_features, 0.3), width_of(num_features)
    assert (structure.num_units >= 1).all() and (structure.num_units <= width).all()
    assert (structure.num_causes >= 1).all() and (structure.num_causes <= most_causes(num_features)).all()
    for i in range(300):
        depth, num_units = int(structure.depth[i]), int(structure.num_units[i])
        real = {block * width + unit for block in range(1, depth + 1) for unit in range(num_units)}
        features, class_units = structure.features[i].tolist(), set(structure.class_units[i].tolist())
        assert class_units <= real and len({unit // width for unit in class_units}) == 1
        assert len(set(features)) == num_features
        if structure.is_causal[i]:
            assert set(features) <= real - class_units and structure.num_causes[i] <= MOST_CAUSES
        else:
            assert features == list(range(num_features)) and structure.num_causes[i] == num_features
            assert min(class_units) >= depth * width


def test_kinds_of_functions_occur_in_their_shares():
    is_tree, depth = draw_kinds(0, np.arange(4000), 0, 0.3)
    assert abs(is_tree.mean() - 0.3) < 0.03
    assert set(depth[~is_tree]) == set(range(1, NUM_LAYERS + 1)) and set(depth[is_tree]) == set(
        range(1, NUM_TREE_LAYERS + 1)
    )
    structure = structures(1000, 8, 0.0)
    assert abs(structure.is_causal.float().mean() - 0.5) < 0.05
    assert (structure.depth[:-1] >= structure.depth[1:]).all()


def test_connection_weights_join_real_units_and_have_length_one():
    structure = structures(40, 9, 0.0)
    weights = _weights(random(), structure, width_of(9))
    for i in range(40):
        for layer in range(int(structure.depth[i])):
            num_inputs = int(structure.num_causes[i] if layer == 0 else structure.num_units[i])
            used = weights[i, layer, : int(structure.num_units[i])]
            assert not used[:, num_inputs:].any()
            length = used.square().sum(1)
            assert (((length - 1).abs() < 0.01) | (length == 0)).all()
    zeros = (weights == 0).float().mean((1, 2, 3))
    assert zeros.min() < 0.7 and zeros.max() > 0.9 and zeros.unique().numel() > 30


def test_the_network_equals_a_slow_reference():
    structure = structures(40, 9, 0.0)
    blocks, noise = drawn_blocks(structure, 9)
    _add_network(random(), structure, blocks, noise)
    again = random()
    weights = _weights(again, structure, width_of(9)).double().numpy()
    functions = draw_activations(again, NUM_LAYERS - 1).double().numpy()
    grid = np.linspace(-REACH, REACH, NUM_CELLS + 1)
    for i in range(40):
        x = blocks[i, 0].double().numpy()
        for layer in range(int(structure.depth[i])):
            if layer:
                z = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-8)
                x = np.stack([np.interp(unit.clip(-REACH, REACH), grid, functions[i, layer - 1]) for unit in z])
            x = weights[i, layer] @ x + noise[i, layer].numpy()
            real = slice(int(structure.num_units[i]))
            # Steep functions amplify the difference between float32 and float64.
            difference = np.abs(blocks[i, layer + 1, real].numpy() - x[real])
            assert np.median(difference) < 1e-5 and difference.max() < 0.05


def test_random_trees_depend_on_few_features():
    structure = structures(40, 9, 1.0)
    blocks, noise = drawn_blocks(structure, 9, noise_std=0.0)
    blocks[..., 24:] = blocks[..., :24]  # each row twice
    _add_trees(random(), structure, blocks, noise)
    num_values = []
    for i in range(40):
        for layer in range(1, int(structure.depth[i]) + 1):
            units = blocks[i, layer, : int(structure.num_units[i])]
            assert torch.equal(units[:, 24:], units[:, :24])
            assert units.mean(1).abs().max() < 0.01
            num_values += [len(unit.unique()) for unit in units]
    assert min(num_values) >= 1 and np.mean(np.array(num_values) == 2) > 0.05 and max(num_values) > 8
