"""Linear memory of Legendre Memory Units (Voelker, Kajić and Eliasmith, NeurIPS 2019).

The memory m, a vector of `memory_size` elements, follows a signal u by the equation theta m' = A m + B u. It represents
the last theta samples of u by coefficients of shifted Legendre polynomials. In discrete time, the equation is m_t = A_d
m_(t-1) + B_d u_t.
"""

from functools import lru_cache

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def continuous_system(memory_size: int) -> tuple[Tensor, Tensor]:
    """Returns A (N, N) and B (N,) of theta m' = A m + B u in float64 (equation 2), with N = memory_size >= 1."""
    row = torch.arange(memory_size, dtype=torch.float64)[:, None]
    column = row.T
    alternating = 1 - 2 * ((row - column) % 2)  # (-1)^(i - j)
    a = (2 * row + 1) * torch.where(row < column, -1.0, -alternating)
    return a, ((2 * row + 1) * alternating[:, :1])[:, 0]


@lru_cache(maxsize=32)
def discrete_system(
    memory_size: int, theta: float, dtype: torch.dtype = torch.float64, device: torch.device = _CPU
) -> tuple[Tensor, Tensor]:
    """Returns A_d (N, N) and B_d (N,) of m_t = A_d m_(t-1) + B_d u_t. The caller must not modify the tensors.

    The discretisation holds the signal constant within a time step (zero-order hold). One matrix exponential in float64
    computes both tensors (Van Loan, 1978). theta: window length in time steps, above 0.
    """
    with torch.inference_mode(False), torch.no_grad():
        a, b = continuous_system(memory_size)
        generator = torch.zeros(memory_size + 1, memory_size + 1, dtype=torch.float64)
        generator[:-1, :-1], generator[:-1, -1] = a / theta, b / theta
        held = torch.linalg.matrix_exp(generator).to(device, dtype)
        return held[:-1, :-1].contiguous(), held[:-1, -1].contiguous()


def orbit(matrix: Tensor, start: Tensor, length: int) -> Tensor:
    """Returns start, A start, ..., A^(length - 1) start as (N, length, K). matrix: A, (N, N). start: (N, K)."""
    states, power = start.unsqueeze(1), matrix
    while (num_states := states.shape[1]) < length:
        if num_states > 1:
            power = power @ power
        known = states[:, : length - num_states]
        states = torch.cat([states, (power @ known.flatten(1)).view_as(known)], dim=1)
    return states


def impulse_response(memory_size: int, theta: float, length: int) -> Tensor:
    """Returns A_d^k B_d, the memory k time steps after an impulse, for k < length: (memory_size, length) float64."""
    a, b = discrete_system(memory_size, theta)
    return orbit(a, b[:, None], length).squeeze(2)


def orthonormal_scale(memory_size: int, theta: float) -> Tensor:
    """Returns factors that scale m to coefficients of orthonormal polynomials over the window: (memory_size,) float64.

    All elements of the scaled memory respond to an impulse with approximately equal energy.
    """
    return (theta / (2 * torch.arange(memory_size, dtype=torch.float64) + 1)).sqrt()
