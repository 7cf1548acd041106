"""Speech recognisers for utterances of any length, in a form that `torch.export` can export.

In training, the algorithm that computes an LMU's memory depends on the sequence length. The modules in this file use
one algorithm for all lengths, and only operations that runtimes other than PyTorch support.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.speech.legendre import discrete_system, impulse_response, orthonormal_scale
from models.speech.lmu import LMU
from models.speech.parallel_lmu import ParallelLMU
from models.speech.recogniser import SpeechRecogniser
from trainer.common.torch_private import scan

_FORGOTTEN = 1e-9
"""Maximum share of an impulse response that may be cut off at the end."""
_LONGEST_RESPONSE = 2**16


class RecogniserOfAnyLength(nn.Module):
    """Exportable copy of a recogniser in eval mode, called as `log_probs, lengths = module(audio, num_samples)`.

    audio: (B, S), approximately in [-1, 1], zero-padded; S must be at least the front end's window length.
    num_samples: (B,) int64.
    """

    def __init__(self, recogniser: SpeechRecogniser) -> None:
        super().__init__()
        self.recogniser = copy.deepcopy(recogniser)
        for name, module in list(self.recogniser.named_modules()):
            if isinstance(module, ParallelLMU):
                self.recogniser.set_submodule(name, ConvolvedLMU(module))
            elif isinstance(module, LMU):
                self.recogniser.set_submodule(name, ScannedLMU(module))

    def forward(self, audio: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, lengths = self.recogniser(audio, num_samples)
        return log_probs, lengths


class ConvolvedLMU(nn.Module):
    """Replaces a `ParallelLMU`, and computes its memory by convolving signals with the memory's impulse response.

    The impulse response is cut off where it is nearly zero, because a memory forgets inputs much older than its window.
    """

    response: Tensor

    def __init__(self, lmu: ParallelLMU) -> None:
        super().__init__()
        self.lmu = lmu
        response = impulse_response(lmu.memory_size, lmu.theta, _response_length(lmu.memory_size, lmu.theta))
        response = response * orthonormal_scale(lmu.memory_size, lmu.theta)[:, None]
        self.register_buffer("response", response.to(lmu.skip.weight))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the outputs of all time steps: x (B, T, input_size) -> (B, T, hidden_size)."""
        lmu = self.lmu
        u = lmu.signal_activation(lmu.encode(x))
        if mask is not None:
            u = u * mask.unsqueeze(2)
        signals = u.mT.reshape(-1, 1, u.shape[1])  # (B * channels, 1, T)
        before = self.response.shape[1] - 1
        memories = [F.conv1d(F.pad(signals, (before, 0)), self.response.flip(1).unsqueeze(1))]
        if lmu.num_directions == 2:
            memories.append(F.conv1d(F.pad(signals, (0, before)), self.response.unsqueeze(1)))
        memory = torch.stack(memories, dim=1)  # (B * channels, directions, memory_size, T)
        memory = memory.unflatten(0, (-1, u.shape[2])).permute(0, 4, 2, 3, 1).flatten(2)
        return lmu.activation(lmu.read_out(memory) + lmu.skip(x))


def _response_length(memory_size: int, theta: float) -> int:
    """Returns the number of time steps, a power of two, after which the impulse response is negligible."""
    length = 64
    while length < _LONGEST_RESPONSE:
        response = impulse_response(memory_size, theta, 2 * length).abs().sum(0)
        if response[length:].sum() <= _FORGOTTEN * response.sum():
            break
        length *= 2
    return length


class ScannedLMU(nn.Module):
    """Replaces an `LMU`, and computes its loop over time with a single `scan` operation."""

    a: Tensor
    b: Tensor

    def __init__(self, lmu: LMU) -> None:
        super().__init__()
        self.lmu = lmu
        a, b = discrete_system(lmu.memory_size, lmu.theta, lmu.w_x.dtype, lmu.w_x.device)
        self.register_buffer("a", a)
        self.register_buffer("b", b)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Returns the hidden states of all time steps, from a zero state: (B, T, input_size) -> (B, T, hidden_size)."""
        lmu, a, b = self.lmu, self.a, self.b
        e_h, e_m, w_h, w_m = lmu.e_h, lmu.e_m, lmu.w_h, lmu.w_m

        def step(state: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
            (h, m), (of_u, of_h) = state, now
            u = of_u + h @ e_h.T + m @ e_m.T
            m = m @ a.T + u * b
            h = torch.tanh(of_h + h @ w_h.T + m @ w_m.T)
            return (h, m), h.clone()

        drive = (x @ lmu.e_x.T).transpose(0, 1), (x @ lmu.w_x.T).transpose(0, 1)
        start = x.new_zeros(x.shape[0], w_h.shape[0]), x.new_zeros(x.shape[0], lmu.memory_size)
        _, states = scan(step, start, drive)
        return states.transpose(0, 1), None
