"""Parallel form of the Legendre Memory Unit (Chilkuri and Eliasmith, ICML 2021)."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.speech.legendre import discrete_system, impulse_response, orbit, orthonormal_scale
from trainer.common.tensors import pinned

_SMALL = 4096
"""Number of operations per channel and time step up to which a matrix product is faster than Fourier transforms."""
_CACHED = 2**18
"""Number of spectrum elements (2 MiB) processed at a time if the kernels are applied by elementwise products."""
_LARGE = 2**21
"""Number of spectrum elements (16 MiB) processed at a time if the kernels are applied by matrix products.

Larger matrix products are faster, but above 32 MiB allocators map new memory for each product, which takes longer than
the arithmetic.
"""


class ParallelLMU(nn.Module):
    """Recurrent layer with a linear memory, which is computed for all time steps in parallel.

        u_t = f_u(U x_t + b_u)                        `channels` numbers
        m_t = A_d m_(t-1) + B_d u_t                   `memory_size` numbers per channel
        o_t = f(W_m m_t + W_x x_t + b_o)              `hidden_size` numbers

    For small layers and short sequences, the layer computes m as the product of u and a Toeplitz matrix of the memory's
    impulse response. Otherwise it convolves u with the kernel W_m A_d^k B_d by Fourier transforms, and does not store
    m. W_m multiplies m scaled by `orthonormal_scale`, not m itself.

    theta: window length of the memory in time steps, above 0. bidirectional: whether each channel has a second memory,
    which runs backwards from the end of the sequence. signal_activation, activation: f_u and f.
    """

    stays_eager: ClassVar[bool] = True
    """Whether to exclude the module from `torch.compile`, which would recompute impulse responses in each call."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        memory_size: int,
        theta: float,
        *,
        channels: int = 1,
        bidirectional: bool = False,
        signal_activation: Callable[[Tensor], Tensor] = torch.relu,
        activation: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        self.memory_size, self.theta = memory_size, theta
        self.num_directions = 2 if bidirectional else 1
        self.signal_activation, self.activation = signal_activation, activation
        self.encode = nn.Linear(input_size, channels)
        self.read_out = nn.Linear(self.num_directions * channels * memory_size, hidden_size, bias=False)
        self.skip = nn.Linear(input_size, hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the outputs o_t of all time steps: x (B, T, input_size) -> (B, T, hidden_size), with T >= 1.

        mask: (B, T) bool, False at time steps to exclude from memories. Padding at the end must be excluded only if the
        layer is bidirectional.
        """
        u = self._signals(x)
        if mask is not None:
            u = u * mask.unsqueeze(2)
        return self.activation(self._argument(u, x))

    def stream(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Processes the next time steps of a sequence; returns their outputs, (B, T, hidden_size), and the new state.

        x: (B, T, input_size), with T >= 1. state: the memory, (B, channels, memory_size), returned by the previous
        call, or None at the start. The layer must be unidirectional.
        """
        assert self.num_directions == 1, "a bidirectional memory cannot be streamed"
        u = self._signals(x)
        answer = self._argument(u, x)
        with torch.autocast(x.device.type, enabled=False):
            responses = self._responses(u)
            after = _memory_after(u, responses)
            if state is not None:
                free = self._without_input(state.to(u.dtype), x.shape[1])
                weight = self._weight(u.dtype)[:, 0]
                answer = answer + torch.einsum("ntbc,hnc,n->bth", free, weight, responses.scale)
                after = after + free[:, -1].permute(1, 2, 0)
        return self.activation(answer), after

    def _argument(self, u: Tensor, x: Tensor) -> Tensor:
        """Returns the input of the activation f, (B, T, hidden_size), for memories that are initially zero."""
        small = self.num_directions * self.memory_size * (x.shape[1] + self.skip.out_features) <= _SMALL
        return self._by_product(u, x) if small else self._by_transforms(u, x)

    def _by_product(self, u: Tensor, x: Tensor) -> Tensor:
        """Computes the input of the activation f with a matrix product, which is fastest for few time steps."""
        with torch.autocast(x.device.type, enabled=False):
            num_steps = u.shape[1]
            # Only matrices of power-of-two sizes are built and cached, so a GPU rarely waits for a new matrix.
            most_steps = 2 ** (num_steps - 1).bit_length()
            matrix = _toeplitz(self.memory_size, self.theta, self.num_directions, most_steps, u.dtype, u.device)
            matrix = matrix[: num_steps * self.num_directions * self.memory_size, :num_steps]
            memory = (matrix @ u).view(len(u), num_steps, -1)  # the last dimension: directions, memory_size, channels
        return self.read_out(memory) + self.skip(x)

    def _by_transforms(self, u: Tensor, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            responses = self._responses(u)
            answer = _Convolution.apply(u.mT, _kernels(self._weight(u.dtype), responses), responses.size)
        bias, skip = self.skip.bias[:, None], self.skip.weight.expand(len(x), -1, -1)
        return answer.add_(torch.baddbmm(bias, skip, x.mT)).mT

    def last(self, x: Tensor) -> Tensor:
        """Returns only the output of the last time step: (B, T, input_size) -> (B, hidden_size).

        The layer must be unidirectional.
        """
        assert self.num_directions == 1
        u = self._signals(x)
        with torch.autocast(x.device.type, enabled=False):
            responses = self._responses(u)
            memory = _memory_after(u, responses).mT * responses.scale[:, None]
        return self.activation(self.read_out(memory.flatten(1)) + self.skip(x[:, -1]))

    def _signals(self, x: Tensor) -> Tensor:
        """Returns the signals u, (B, T, channels), in at least float32, which Fourier transforms need."""
        u = self.signal_activation(self.encode(x))
        return u.to(torch.promote_types(u.dtype, torch.float32))

    def _responses(self, u: Tensor) -> "_Responses":
        return _responses(self.memory_size, self.theta, _fft_size(u.shape[1]), u.dtype, u.device)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """Returns W_m in the shape (hidden_size, directions, memory_size, channels)."""
        return self.read_out.weight.to(dtype).unflatten(1, (self.num_directions, self.memory_size, -1))

    def _without_input(self, state: Tensor, num_steps: int) -> Tensor:
        """Returns the memories after each of `num_steps` zero inputs, (memory_size, num_steps, B, channels).

        state: initial memory, (B, channels, memory_size).
        """
        a, _ = discrete_system(self.memory_size, self.theta, state.dtype, state.device)
        return orbit(a, a @ state.flatten(0, 1).T, num_steps).unflatten(2, state.shape[:2])


class _Responses(NamedTuple):
    """Impulse response of a memory, and the spectrum of the scaled response."""

    impulse: Tensor
    """Impulse response, (memory_size, size // 2)."""
    scale: Tensor
    """Factors that scale the memory's elements, (memory_size,)."""
    real: Tensor
    """Real part of the scaled response's spectrum, (memory_size, size // 2 + 1)."""
    imaginary: Tensor

    @property
    def size(self) -> int:
        """Returns the size of the Fourier transforms."""
        return 2 * self.impulse.shape[1]


@lru_cache(maxsize=128)
def _responses(memory_size: int, theta: float, size: int, dtype: torch.dtype, device: torch.device) -> _Responses:
    with torch.inference_mode(False), torch.no_grad():
        impulse, scale = impulse_response(memory_size, theta, size // 2), orthonormal_scale(memory_size, theta)
        spectrum = torch.fft.rfft(scale[:, None] * impulse, size)
        parts = impulse, scale, spectrum.real, spectrum.imag
        return _Responses(*(pinned(part.to(dtype), device).to(device, non_blocking=True) for part in parts))


@lru_cache(maxsize=128)
def _toeplitz(
    memory_size: int, theta: float, num_directions: int, num_steps: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the (T * directions * memory_size, T) matrix that maps a signal to its scaled memories at all T steps.

    Rows are ordered by time step, direction and element of the memory.
    """
    with torch.inference_mode(False), torch.no_grad():
        impulse = impulse_response(memory_size, theta, num_steps) * orthonormal_scale(memory_size, theta)[:, None]
        lag = torch.arange(num_steps)[:, None] - torch.arange(num_steps)
        ahead = torch.where(lag >= 0, impulse[:, lag.clamp(min=0)], 0.0)  # (memory_size, T, T)
        directions = torch.stack([ahead, ahead.mT][:num_directions], dim=1)
        matrix = directions.permute(2, 1, 0, 3).flatten(0, 2).to(dtype)
        return pinned(matrix, device).to(device, non_blocking=True)


def _memory_after(u: Tensor, responses: _Responses) -> Tensor:
    """Returns the memory after signals u, starting from zero: (B, T, channels) -> (B, channels, memory_size)."""
    return torch.einsum("btc,nt->bcn", u.flip(1), responses.impulse[:, : u.shape[1]])


def _kernels(weight: Tensor, responses: _Responses) -> Tensor:
    """Returns the complex spectra of the impulse response of W_m m: (H, channels, frequencies).

    weight: W_m as (H, directions, memory_size, channels). The second direction runs backwards, so its spectrum is the
    conjugate of the first direction's spectrum.
    """
    ahead, back = (weight[:, i].mT.flatten(0, 1) for i in (0, -1))  # each (H * channels, memory_size)
    if weight.shape[1] == 2:
        spectra = torch.complex((ahead + back) @ responses.real, (ahead - back) @ responses.imaginary)
    else:
        spectra = torch.complex(ahead @ responses.real, ahead @ responses.imaginary)
    return spectra.unflatten(0, (len(weight), -1))


class _Convolution(torch.autograd.Function):
    """Convolves signals with kernels, given as spectra, and sums the results over channels."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, kernels: Tensor, size: int) -> Tensor:
        """Computes the convolution, (B, H, T). u: (B, C, T). kernels: complex, (H, C, size // 2 + 1). size: even."""
        signals = torch.fft.rfft(u, size)
        ctx.save_for_backward(signals, kernels)
        ctx.size, ctx.num_steps = size, u.shape[2]
        answer = u.new_empty(len(u), len(kernels), u.shape[2])
        for part in _parts(u, kernels):
            answer[part] = torch.fft.irfft(_product(signals[part], kernels), size)[..., : u.shape[2]]
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        signals, kernels = ctx.saved_tensors
        grad_u = grad.new_empty(len(grad), kernels.shape[1], ctx.num_steps)
        grad_kernels = torch.zeros_like(kernels)
        reverse_signals, reverse_kernels = signals.conj().transpose(0, 1), kernels.conj().transpose(0, 1)
        for part in _parts(grad, kernels):
            grads = torch.fft.rfft(grad[part], ctx.size)
            grad_kernels += _product(grads.transpose(0, 1), reverse_signals[:, part])
            grad_u[part] = torch.fft.irfft(_product(grads, reverse_kernels), ctx.size)[..., : ctx.num_steps]
        # The full spectrum of a real signal contains each frequency twice, except the lowest and highest frequency.
        grad_kernels[..., 1:-1] *= 2
        return grad_u, grad_kernels / ctx.size, None


def _parts(batch: Tensor, kernels: Tensor) -> list[slice]:
    """Splits a batch into slices, to limit the size of spectra on a CPU; returns a single slice on a GPU."""
    if batch.device.type == "cpu":
        most_elements = _CACHED if kernels.shape[1] == 1 else _LARGE
        num_sequences = max(1, most_elements // kernels[:, 0].numel())
    else:
        num_sequences = len(batch)
    return [slice(start, start + num_sequences) for start in range(0, len(batch), num_sequences)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sum over k of a[m, k] * b[n, k] for each frequency: (M, K, F), (N, K, F) -> (M, N, F)."""
    if a.shape[1] == 1:
        return a * b.squeeze(1)
    if len(b) == 1:
        return (a * b).sum(dim=1, keepdim=True)
    return (a.permute(2, 0, 1).contiguous() @ b.permute(2, 1, 0).resolve_conj().contiguous()).permute(1, 2, 0)


def _fft_size(num_steps: int) -> int:
    """Returns the smallest even FFT size that avoids wrap-around and has no prime factor above 7."""
    size = 2 * num_steps
    while not _is_smooth(size):
        size += 2
    return size


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number == 1
