"""The masks of dropout on a CPU."""

import pytest
import torch

from models.layers.dropout import Dropout, dropout_mask


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 0.999999])
def test_a_mask_has_the_mean_of_one(p):
    torch.manual_seed(0)
    mask = dropout_mask((1000, 1001), p, torch.ones(()))
    assert mask.shape == (1000, 1001)
    assert len(mask.unique()) <= 2
    share = float((mask > 0).double().mean())
    assert share == pytest.approx(max(1 - p, 2**-16), abs=2e-3, rel=0.5)
    assert float(mask.max()) == pytest.approx(1 / max(1 - p, 2**-16), rel=2e-2)


def test_eval_mode_is_the_identity():
    x = torch.ones(3)
    assert Dropout(0.999999).eval()(x) is x
