"""Tests the recurrent layer against its equations, one step after the other, and split anywhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.speech.legendre import discrete_system
from models.speech.lmu import LMU


def layer(input_size: int = 3, hidden_size: int = 5, memory_size: int = 7, theta: float = 11.0) -> LMU:
    """Returns a float64 layer with an e_m that is not 0."""
    torch.manual_seed(0)
    lmu = LMU(input_size, hidden_size, memory_size, theta).double()
    with torch.no_grad():
        lmu.e_m.normal_(std=0.1)
    return lmu


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_time_loop(lmu: LMU, x: Tensor, h: Tensor, m: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes equations 4, 6 and 7 of the paper."""
    a, b = discrete_system(lmu.memory_size, lmu.theta)
    outputs = []
    for x_t in x.unbind(1):
        u = F.linear(x_t, lmu.e_x) + F.linear(h, lmu.e_h) + F.linear(m, lmu.e_m)
        m = F.linear(m, a) + F.linear(u, b[:, None])
        h = torch.tanh(F.linear(x_t, lmu.w_x) + F.linear(h, lmu.w_h) + F.linear(m, lmu.w_m))
        outputs.append(h)
    return torch.stack(outputs, dim=1), (h, m)


@pytest.mark.parametrize("num_steps", [1, 2, 60])
def test_equals_the_time_loop_with_all_gradients(num_steps):
    lmu, x, weights = layer(), inputs(4, num_steps, 3), inputs(4, num_steps, 5, seed=2)
    start = inputs(4, 5, seed=3), inputs(4, 7, seed=4)
    results = []
    for form in (lambda x, h, m: lmu(x, (h, m)), lambda x, h, m: by_time_loop(lmu, x, h, m)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *start)]
        outputs, (h, m) = form(*leaves)
        loss = (outputs * weights).sum() + h.square().sum() + m.sin().sum()
        results.append(((outputs, h, m), torch.autograd.grad(loss, [*leaves, *lmu.parameters()])))
    (outputs, grads), (expected, expected_grads) = results
    for value, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-12)
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-10)


def test_the_state_is_zero_at_the_beginning():
    lmu, x = layer(), inputs(2, 6, 3)
    zeros = torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, 7, dtype=torch.float64)
    assert torch.equal(lmu(x)[0], lmu(x, zeros)[0])


def test_pieces_give_the_result_of_the_whole():
    lmu, x = layer(), inputs(2, 23, 3)
    whole, (h, m) = lmu(x)
    pieces, state = [], None
    for piece in x.split([1, 1, 4, 17], dim=1):
        output, state = lmu(piece, state)
        pieces.append(output)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(state, (h, m), rtol=0, atol=1e-13)


def test_the_layer_of_the_paper_has_its_size():
    lmu = LMU(1, 212, 256, 784)
    assert sum(parameter.numel() for parameter in lmu.parameters()) + 212 * 10 + 10 == 102_027


def test_keeps_single_precision_under_autocast():
    lmu, x = layer().float(), inputs(2, 6, 3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, _ = lmu(x.bfloat16())
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, lmu(x.bfloat16().float())[0], rtol=0, atol=1e-6)


def test_trains_after_inference_with_the_same_layer():
    lmu, x = layer(theta=12.5), inputs(1, 2, 3)
    with torch.inference_mode():
        lmu(x)
    lmu(x)[0].sum().backward()
    assert lmu.w_m.grad is not None
