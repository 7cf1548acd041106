import numpy as np
import pytest
import torch

from data.tabular.prior.activations import NUM_CELLS, REACH, apply, draw_activations
from data.tabular.prior.randomness import TableRandom

GRID = np.linspace(-REACH, REACH, NUM_CELLS + 1)


def test_random_functions_are_standardised_and_differ():
    functions = draw_activations(TableRandom(0, np.arange(200), 0), 3).double()
    assert functions.shape == (200, 3, NUM_CELLS + 1) and functions.isfinite().all()
    density = torch.tensor(np.exp(-(GRID**2) / 2) / np.exp(-(GRID**2) / 2).sum())
    mean, variance = (functions * density).sum(-1), (functions**2 * density).sum(-1)
    assert mean.abs().max() < 1e-4
    assert variance.max() < 1.001 and (variance > 0.99).float().mean() > 0.95
    is_same = (functions[:, 0] == functions[:, 1]).all(1)
    assert is_same.float().mean() < 0.1  # equal kinds still differ in scale


def test_functions_do_not_depend_on_the_batch():
    """150 tables draw all kinds of functions; few of them show a rounding that depends on the place in a tensor."""
    together = draw_activations(TableRandom(0, np.arange(150), 0), 3)
    for i in range(150):
        assert torch.equal(draw_activations(TableRandom(0, np.array([i]), 0), 3)[0], together[i])


def test_activations_are_smooth_or_steep():
    """Straight lines, jumps and wiggles are all frequent."""
    functions = draw_activations(TableRandom(0, np.arange(400), 0), 1)[:, 0]
    steps = functions.diff(dim=1)
    turns = ((steps.diff(dim=1).abs() > 1e-3) & (steps[:, 1:] * steps[:, :-1] < 0)).sum(1)
    steepest = steps.abs().amax(1)
    assert (turns == 0).float().mean() > 0.2 and (turns > 3).float().mean() > 0.15
    assert (steepest > 1).float().mean() > 0.02


@pytest.mark.parametrize(("reach", "tolerance"), [(1.0, 2e-4), (3 * REACH, 1e-2)])
def test_apply_interpolates(reach, tolerance):
    functions = draw_activations(TableRandom(1, np.arange(5), 0), 1)[:, 0]
    x = reach * (2 * torch.rand(5, 7, 33, generator=torch.Generator().manual_seed(0)) - 1)
    expected = [np.interp(x[i].clip(-REACH, REACH), GRID, functions[i]) for i in range(5)]
    np.testing.assert_allclose(apply(functions, x), np.stack(expected), atol=tolerance)
