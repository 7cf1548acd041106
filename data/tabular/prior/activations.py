"""Random activation functions of a causal model's units, tabulated on a grid.

The module uses only torch functions, such as exp and tanh, whose rounding does not depend on an element's position.
Other functions, such as F.silu, round the last elements of a tensor differently.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from data.tabular.prior.randomness import TableRandom, products

REACH = 4.0
"""Bound of the grid, which covers standardised inputs from -REACH to REACH; other inputs are clamped."""
NUM_CELLS = 127
_GRID = torch.linspace(-REACH, REACH, NUM_CELLS + 1)
_DENSITY = torch.softmax(-_GRID.square() / 2, 0)
_NUM_WAVES = 32
_WAVE_NUMBERS = torch.arange(1.0, _NUM_WAVES + 1)
_WAVES = torch.cat([torch.sin(_WAVE_NUMBERS[:, None] * _GRID * (math.pi / 2 / REACH) + phase) for phase in (0, 1.5708)])
MOST_ARGUMENT = 30.0
"""Largest absolute argument of any activation function; exp(30) is far below the largest float32."""


def _elu(x: Tensor, scale: float = 1.0, slope: float = 1.0) -> Tensor:
    return scale * torch.where(x > 0, x, slope * (x.clamp(max=0).exp() - 1))


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: torch.where(x > 0, x, 0.01 * x),
    torch.tanh,
    _elu,
    lambda x: _elu(x, 1.0507, 1.6733),
    lambda x: x / (1 + (-x).exp()),
    lambda x: x.clamp(min=0),
    lambda x: (1 + x.exp()).log(),
    lambda x: x.clamp(0, 6),
    lambda x: x.clamp(-1, 1),
    torch.sign,
    lambda x: (-x.square()).exp(),
    torch.exp,
    lambda x: x.abs().sqrt(),
    lambda x: (x.abs() <= 1).float(),
    torch.sin,
    torch.square,
    torch.abs,
)
_STEEPNESS = 0.7
"""Standard deviation of the logarithm of a function's input scale; chains of steeper functions yield noise."""
_NUM_FOURIER = 10
"""A random Fourier series is this many times as likely as any other function (TabICL, arXiv 2502.05564)."""


def draw_activations(random: TableRandom, num_layers: int) -> Tensor:
    """Draws a tabulated function for each layer of each table: (G, num_layers, NUM_CELLS + 1).

    For standard normal inputs, outputs have mean 0 and variance 1, unless the function is constant on the grid.
    """
    num_kinds = len(FUNCTIONS) + _NUM_FOURIER
    kinds = random.integer(0, num_kinds - 1, num_layers)
    kinds = torch.where(random.chance(0.5, 1), kinds[:, :1], kinds)
    scale, shift = random.normal(num_layers, 1).mul(_STEEPNESS).exp(), random.normal(num_layers, 1)
    arguments = (_GRID * scale + shift).clamp_(-MOST_ARGUMENT, MOST_ARGUMENT).flatten(0, 1)
    # Layers are sorted by kind of function, so that each function is applied to a slice.
    order = kinds.flatten().argsort()
    counts = kinds.flatten().bincount(minlength=num_kinds)[: len(FUNCTIONS)].tolist()
    values = _fourier_series(random, num_layers).flatten(0, 1)
    start = 0
    for function, count in zip(FUNCTIONS, counts, strict=True):
        if count:
            rows = order[start : start + count]
            values[rows] = function(arguments[rows])
        start += count
    values -= (values * _DENSITY).sum(-1, keepdim=True)
    values *= ((values.square() * _DENSITY).sum(-1, keepdim=True) + 1e-6).rsqrt()
    return values.view(-1, num_layers, NUM_CELLS + 1)


def _fourier_series(random: TableRandom, num_layers: int) -> Tensor:
    decay = random.log_between(1.0, 3.0, num_layers, 1)
    amplitudes = random.normal(num_layers, 2 * _NUM_WAVES) * (-decay * _WAVE_NUMBERS.log()).exp().repeat(1, 1, 2)
    return products(amplitudes, _WAVES.expand(len(amplitudes), -1, -1))


def apply(function: Tensor, x: Tensor) -> Tensor:
    """Evaluates each table's function, (G, NUM_CELLS + 1), at inputs x, (G, ...), by linear interpolation."""
    scale = NUM_CELLS / (2 * REACH)
    position = x.mul(scale).add_(REACH * scale).clamp_(0, NUM_CELLS - 1e-3).flatten(1)
    cell = position.long()
    slope = (function[:, 1:] - function[:, :-1]).gather(1, cell)
    return function.gather(1, cell).addcmul_(slope, position.sub_(cell)).view_as(x)
