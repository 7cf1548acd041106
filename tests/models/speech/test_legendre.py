"""Tests what the window of the linear memory shows, and each fast form against a slow one."""

import math

import pytest
import torch

from models.speech.legendre import continuous_system, discrete_system, impulse_response, orbit, orthonormal_scale


def delayed_read_out(memory_size: int, delays):
    """Returns weights that read a delayed input from the memory: u(t - delay * theta) is about weights @ m(t).

    delays: (D,) in [0, 1], as shares of the window. Returns (D, memory_size) float64: the Legendre polynomials
    P_i(2 delay - 1) by Bonnet's recursion; equation 3 of the paper.
    """
    x = 2 * delays.double() - 1
    values = [torch.ones_like(x), x]
    for i in range(1, memory_size - 1):
        values.append(((2 * i + 1) * x * values[i] - i * values[i - 1]) / (i + 1))
    return torch.stack(values[:memory_size], dim=1)


def test_the_continuous_system_equals_the_papers():
    a, b = continuous_system(3)
    assert a.tolist() == [[-1, -1, -1], [3, -3, -3], [-5, 5, -5]]
    assert b.tolist() == [1, -3, 5]


@pytest.mark.parametrize(("memory_size", "theta"), [(1, 3.0), (8, 16.0), (64, 200.0)])
def test_zero_order_hold_solves_the_differential_equation(memory_size, theta):
    """The solution has B_d = A^-1 (A_d - I) B, and A_d is the product of many small steps of a Taylor series."""
    a, b = (tensor / theta for tensor in continuous_system(memory_size))
    a_d, b_d = discrete_system(memory_size, theta)
    eye = torch.eye(memory_size, dtype=torch.float64)
    torch.testing.assert_close(a @ b_d, (a_d - eye) @ b, rtol=0, atol=1e-10)
    small = a / 2**16
    step = eye + small + small @ small / 2 + small @ small @ small / 6
    for _ in range(16):
        step = step @ step
    torch.testing.assert_close(a_d, step, rtol=0, atol=1e-8)


def test_the_discrete_system_is_stable():
    for memory_size, theta in ((8, 16.0), (128, 784.0), (128, 1000.0)):
        a_d, _ = discrete_system(memory_size, theta)
        assert torch.linalg.eigvals(a_d).abs().max() < 0.99


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 33])
def test_an_orbit_equals_repeated_multiplication(length):
    generator = torch.Generator().manual_seed(length)
    matrix, start = (torch.randn(5, k, generator=generator, dtype=torch.float64) / 2 for k in (5, 3))
    expected = [start]
    for _ in range(length - 1):
        expected.append(matrix @ expected[-1])
    torch.testing.assert_close(orbit(matrix, start, length), torch.stack(expected, dim=1), rtol=1e-12, atol=1e-12)


def test_the_impulse_response_is_the_response_to_one_sample():
    a, b = discrete_system(6, 10.0)
    memory, expected = b, []
    for _ in range(50):
        expected.append(memory)
        memory = a @ memory
    torch.testing.assert_close(impulse_response(6, 10.0, 50), torch.stack(expected, dim=1), rtol=0, atol=1e-14)


def test_the_memory_of_the_lmu_represents_its_window():
    """A signal of some periods per window is read back at every delay, and better with more coordinates."""
    theta, num_steps = 200.0, 1000
    time = torch.arange(num_steps, dtype=torch.float64)
    signal = torch.sin(2 * math.pi * 2.5 * time / theta) + 0.5 * torch.cos(2 * math.pi * 1.1 * time / theta + 1)
    delays = torch.linspace(0, 1, 21, dtype=torch.float64)
    errors = []
    for memory_size in (6, 12, 24):
        memory = impulse_response(memory_size, theta, num_steps) @ signal.flip(0)
        # The hold keeps each sample until the next, which delays it by half a step on average.
        delayed = torch.sin(2 * math.pi * 2.5 * (num_steps - 0.5 - delays * theta) / theta)
        delayed += 0.5 * torch.cos(2 * math.pi * 1.1 * (num_steps - 0.5 - delays * theta) / theta + 1)
        errors.append((delayed_read_out(memory_size, delays) @ memory - delayed).abs().max().item())
    assert errors[0] > 10 * errors[1]
    assert errors[2] < 0.02


def test_scaled_coordinates_respond_with_equal_energy():
    """The last coordinates respond less because the system is cut off. Unscaled energies are as 1 to 2 N - 1."""
    scaled = impulse_response(32, 400.0, 1200) * orthonormal_scale(32, 400.0)[:, None]
    energies = scaled.square().sum(dim=1)
    assert energies[:-4].min() > 0.6
    assert energies.min() > 0.1
    assert energies.max() < 1


def test_systems_can_be_trained_after_inference_mode():
    discrete_system.cache_clear()
    with torch.inference_mode():
        a, _ = discrete_system(3, 5.0, torch.float32)
    weight = torch.ones(3, requires_grad=True)
    (a @ weight).sum().backward()
    assert weight.grad is not None
