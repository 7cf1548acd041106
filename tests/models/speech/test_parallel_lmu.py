"""Tests the parallel layer against its equations: as a whole, in pieces and step by step."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.speech import parallel_lmu
from models.speech.legendre import discrete_system, orthonormal_scale
from models.speech.parallel_lmu import ParallelLMU


def layer(dtype: torch.dtype = torch.float64, **options) -> ParallelLMU:
    torch.manual_seed(0)
    settings = {"memory_size": 6, "theta": 9.0, "channels": 2, "activation": torch.tanh} | options
    return ParallelLMU(3, 5, **settings).to(dtype)


def inputs(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def memories(lmu: ParallelLMU, u: Tensor) -> Tensor:
    """Returns the memory after each step by the recurrence, u (B, T, C) -> (B, T, C, N)."""
    a, b = discrete_system(lmu.memory_size, lmu.theta, u.dtype)
    m, after = u.new_zeros(len(u), u.shape[2], len(b)), []
    for u_t in u.unbind(1):
        m = m @ a.T + u_t[..., None] * b
        after.append(m)
    return torch.stack(after, dim=1)


def by_recurrence(lmu: ParallelLMU, x: Tensor) -> Tensor:
    u = lmu.signal_activation(lmu.encode(x))
    read = [memories(lmu, u)]
    if lmu.num_directions == 2:
        read.append(memories(lmu, u.flip(1)).flip(1))
    scaled = torch.stack(read, dim=2) * orthonormal_scale(lmu.memory_size, lmu.theta).to(x.dtype)
    return lmu.activation(lmu.read_out(scaled.mT.flatten(2)) + lmu.skip(x))


@pytest.fixture(params=["product", "transforms", "transforms of one sequence after the other"])
def form(request, monkeypatch):
    """Forces each form of the layer, whatever the sizes."""
    monkeypatch.setattr(parallel_lmu, "_SMALL", math.inf if request.param == "product" else 0)
    if "one sequence" in request.param:
        monkeypatch.setattr(parallel_lmu, "_CACHED", 1)
        monkeypatch.setattr(parallel_lmu, "_LARGE", 1)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 50])
def test_equals_the_recurrence_with_all_gradients(num_steps, channels, bidirectional):
    lmu = layer(channels=channels, bidirectional=bidirectional, signal_activation=F.gelu)
    x, weights = inputs(4, num_steps, 3).requires_grad_(), inputs(4, num_steps, 5, seed=2)
    leaves = [x, *lmu.parameters()]
    outputs, expected = lmu(x), by_recurrence(lmu, x)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    grads, references = (torch.autograd.grad((value * weights).sum(), leaves) for value in (outputs, expected))
    for grad, reference in zip(grads, references, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-10)


def in_pieces(lmu: ParallelLMU, x: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor | None]:
    pieces, state = [], None
    for piece in x.split(sizes, dim=1):
        output, state = lmu.stream(piece, state)
        pieces.append(output)
    return torch.cat(pieces, dim=1), state


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 255, 1000, 2000])
def test_whole_pieces_and_steps_agree_in_single_precision(length):
    lmu, x = layer(torch.float32, memory_size=32, theta=64.0, channels=4), inputs(2, length, 3, dtype=torch.float32)
    with torch.no_grad():
        whole, state = lmu(x), lmu.stream(x)[1]
        u = lmu.signal_activation(lmu.encode(x))
        for sizes in ([length // 3, length - length // 3], [1] * length):
            outputs, after = in_pieces(lmu, x, [size for size in sizes if size])
            torch.testing.assert_close(outputs, whole, rtol=0, atol=1e-5)
            torch.testing.assert_close(after, state, rtol=0, atol=1e-5)
        torch.testing.assert_close(state, memories(lmu, u)[:, -1], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_whole_equals_pieces_for_every_length_to_2000():
    lmu = layer(torch.float32, memory_size=32, theta=64.0, channels=4)
    x = inputs(1, 2000, 3, dtype=torch.float32)
    with torch.no_grad():
        steps, _ = in_pieces(lmu, x, [1] * 2000)
        for length in range(1, 2001):
            whole = lmu(x[:, :length])
            torch.testing.assert_close(whole, steps[:, :length], rtol=0, atol=1e-5)
            if length > 1:
                pieces, _ = in_pieces(lmu, x[:, :length], [length // 2, length - length // 2])
                torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("form")
def test_gradient_flows_through_the_state():
    """Pieces have the gradients of the whole only if states pass gradients back."""
    lmu, x, weights = layer(), inputs(2, 12, 3), inputs(2, 12, 5, seed=2)
    grads = [
        torch.autograd.grad((outputs * weights).sum(), list(lmu.parameters()))
        for outputs in (lmu(x), in_pieces(lmu, x, [5, 1, 6])[0])
    ]
    for whole, pieces in zip(*grads, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("form")
def test_the_last_output_equals_the_last_of_all_outputs():
    lmu, x = layer(), inputs(3, 40, 3).requires_grad_()
    weights = inputs(3, 5, seed=2)
    torch.testing.assert_close(lmu.last(x), lmu(x)[:, -1], rtol=0, atol=1e-12)
    grads = [torch.autograd.grad((o * weights).sum(), [x, *lmu.parameters()]) for o in (lmu.last(x), lmu(x)[:, -1])]
    for last, every in zip(*grads, strict=True):
        torch.testing.assert_close(last, every, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("form")
def test_the_mask_hides_frames_after_the_end():
    lmu, x = layer(bidirectional=True), inputs(2, 20, 3)
    mask = torch.arange(20) < torch.tensor([20, 11])[:, None]
    outputs = lmu(x, mask)
    torch.testing.assert_close(outputs[1:, :11], lmu(x[1:, :11]), rtol=0, atol=1e-12)
    assert not torch.allclose(outputs[1:, :11], lmu(x)[1:, :11])


def test_bidirectional_models_take_no_state():
    with pytest.raises(AssertionError, match="cannot be streamed"):
        layer(bidirectional=True).stream(inputs(1, 4, 3), torch.zeros(1, 2, 6, dtype=torch.float64))


@pytest.mark.usefixtures("form")
def test_memory_keeps_single_precision_under_autocast():
    lmu, x = layer(torch.float32), inputs(2, 30, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, (_, state) = lmu(x), lmu.stream(x)
        outputs.sum().backward()
    assert state.dtype == torch.float32
    torch.testing.assert_close(outputs.float(), lmu(x), rtol=0, atol=0.05)


def test_trains_after_inference_with_the_same_layer():
    lmu, x = layer(theta=12.5), inputs(1, 2, 3)
    with torch.inference_mode():
        lmu(x)
    lmu(x).sum().backward()
    assert lmu.read_out.weight.grad is not None
