import math

import pytest
import torch

from models.layers.dropout import Dropout, dropout_mask


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 0.999999])
def test_dropout_masks_have_mean_1(p):
    torch.manual_seed(0)
    mask = dropout_mask((1000, 1001), p, torch.ones(()))
    assert mask.shape == (1000, 1001)
    assert len(mask.unique()) <= 2
    kept = max(1 - p, 2**-16)
    assert float(mask.max()) == pytest.approx(1 / kept, rel=2e-2)
    assert float(mask.double().mean()) == pytest.approx(1, abs=5 * math.sqrt((1 - kept) / kept / mask.numel()))


def test_eval_mode_is_the_identity():
    x = torch.ones(3)
    assert Dropout(0.999999).eval()(x) is x
