"""Tests normalisation by the context rows for numbers of any size."""

import numpy as np
import pytest
import torch

from models.tabular.normalise import normalise

NAN = float("nan")


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[None, :, None]


def test_equals_numpy_and_ignores_what_is_missing():
    x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5 + 2
    x[0, 2, 1] = x[1, 7, 0] = NAN
    x[0, 3, 1] = torch.inf
    values, missing = normalise(x[:, :6], x[:, 6:])
    known = np.where(np.isfinite(x.numpy()), x.numpy(), np.nan)
    z = (known - np.nanmean(known[:, :6], axis=1, keepdims=True)) / np.nanstd(known[:, :6], axis=1, keepdims=True)
    np.testing.assert_allclose(values, np.nan_to_num(3 * np.arcsinh(z / 3)), atol=1e-12)
    np.testing.assert_array_equal(missing, np.isnan(known))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("offset", [0, 1000])
def test_scale_and_offset_do_not_matter(scale, offset):
    x = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])[None, :, None]
    values, _ = normalise((x + offset) * scale, column(2.0 + offset) * scale)
    expected, _ = normalise(x, column(2.0))
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-3 if offset else 1e-5)


def test_predictions_far_from_the_context_are_bounded():
    values, _ = normalise(column(-1, 1), column(1e3, 1e38, -1e38, NAN, torch.inf))
    assert values.flatten()[2:].tolist() == pytest.approx([3 * np.arcsinh(1e3 / 3), 40.23, -40.23, 0, 0], abs=0.01)
    values, _ = normalise(column(-1e-38, 1e-38), column(1e38))
    assert values[0, 2, 0] == pytest.approx(40.23, abs=0.01)


@pytest.mark.parametrize(
    "context", [(7.0, 7.0, 7.0), (0.1, 0.1, 0.1), (0.0, 0.0), (NAN, NAN), (3.0, NAN), (1e38, 1e38)]
)
def test_a_constant_column_becomes_zero(context):
    values, _ = normalise(column(*context), column(5.0, NAN))
    assert not values.any()


def test_rows_after_the_context_have_no_effect():
    x = column(3.0, 1.0, 4.0)
    padded = torch.cat([x, column(100.0, torch.inf)], dim=1)
    values, _ = normalise(padded, column(2.0), torch.tensor([3]))
    expected, _ = normalise(x, column(2.0))
    assert torch.equal(values[:, [0, 1, 2, 5]], expected)
