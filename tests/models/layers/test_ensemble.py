import pytest
import torch

from models.layers.ensemble import Ensemble


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_ensemble_averages_probabilities_of_confident_models(dtype):
    """The logarithm stays finite for probabilities that half precision rounds to 0."""
    members = [torch.nn.Linear(2, 3, dtype=dtype) for _ in range(3)]
    x = 100 * torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    logits = torch.stack([member(x) for member in members]).double()
    expected = logits.softmax(dim=2).mean(dim=0)
    found = Ensemble(members)(x)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double().exp(), expected, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(found).all()
