"""Speech encoders, which map features of utterances to states from which a recogniser predicts symbols.

Call an encoder as `states, lengths = encoder(features, lengths)`. features: (B, T, F), padded at the end. lengths: (B,)
int64, frames per utterance, at least 1. states: (B, T', encoder.out_features). Padding does not affect the states of an
utterance, and states beyond the end of an utterance have arbitrary values.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.dropout import Dropout, dropout_mask
from models.layers.lengths import within_lengths
from models.speech.lmu import LMU
from models.speech.parallel_lmu import ParallelLMU

_NUM_INNER = 64
"""Number of output channels of each convolution except the last; small, because early convolutions have many frames."""

StreamState = list[Tensor | None]
"""State between calls of `stream`: the inputs that each convolution still needs, then the memory of each block."""


class AttentionLMU(nn.Module):
    """Encoder from the repository LeaStef/asr: layers of self-attention and a recurrent LMU, with one state per frame.

    With a linear layer that maps states to 34 symbols, the default model has 7,158,818 parameters.

    theta: window length of the LMU's memory, in frames.
    """

    def __init__(
        self,
        num_features: int = 80,
        width: int = 512,
        num_layers: int = 4,
        num_heads: int = 8,
        memory_size: int = 256,
        theta: float = 1000,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.out_features, self.subsampling = width, 1
        self.enter = nn.Linear(num_features, width)
        self.blocks: nn.ModuleList = nn.ModuleList(
            AttentionLMULayer(width, num_heads, memory_size, theta, dropout) for _ in range(num_layers)
        )
        self.leave = nn.Linear(width, width)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        # An empty utterance attends to one frame of padding, because a softmax over no frames is undefined.
        mask = within_lengths(lengths.clamp(min=1), features.shape[1])[:, None, None]
        states = self.enter(features)
        for layer in self.blocks:
            states = layer(states, mask)
        return self.leave(states), lengths


class AttentionLMULayer(nn.Module):
    """Applies self-attention with a residual connection and a norm, then an LMU, a norm and dropout."""

    def __init__(self, width: int, num_heads: int, memory_size: int, theta: float, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.lmu = LMU(width, width, memory_size, theta)
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Updates states x, (B, T, width). mask: (B, 1, 1, T) bool, True at frames to attend to."""
        query, key, value = self.query_key_value(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # (B, heads, T, width / heads)
        x = self.attention_norm(x + self.dropout(self.attended(mixed.transpose(1, 2).flatten(2))))
        states, _ = self.lmu(x)
        return self.dropout(self.norm(states))


class ParallelLMUEncoder(nn.Module):
    """Applies strided causal convolutions, then residual blocks of a parallel LMU and a feed-forward layer.

    The number of states, T', is ceil(T / subsampling), where subsampling is 1, 2 or 4. theta: window length of the
    memories, in frames after subsampling. States of a unidirectional encoder depend only on current and earlier
    features, so `stream` can process an utterance in chunks.
    """

    def __init__(
        self,
        num_features: int,
        width: int = 96,
        num_blocks: int = 3,
        memory_size: int = 8,
        theta: float = 16,
        channels: int = 16,
        subsampling: int = 4,
        bidirectional: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.out_features, self.bidirectional = width, bidirectional
        strides = {1: [1], 2: [2], 4: [2, 2]}[subsampling]
        sizes = pairwise([num_features, *[_NUM_INNER] * (len(strides) - 1), width])
        self.subsampling = subsampling
        self.convolutions = nn.ModuleList(
            CausalConvolution(*size, stride) for size, stride in zip(sizes, strides, strict=True)
        )
        self.enter = nn.LayerNorm(width)
        self.blocks: nn.ModuleList = nn.ModuleList(
            ParallelLMUBlock(width, memory_size, theta, channels, bidirectional, dropout) for _ in range(num_blocks)
        )
        self.leave = nn.LayerNorm(width)
        self.dropout = ChannelDropout(dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        states = features
        for convolution in self.convolutions:
            states, _ = convolution(states)
        lengths = (lengths + self.subsampling - 1) // self.subsampling
        states = self.dropout(self.enter(states))
        mask = within_lengths(lengths, states.shape[1])
        for block in self.blocks:
            states = block(states, mask)
        return self.leave(states), lengths

    def stream(self, features: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """Returns states for the next frames of an utterance, (B, T, F) -> (B, T', out_features), and the stream state.

        T and T' can be 0. state: returned by the previous call, or None at the start. Chunks of any length give the
        same outputs as the whole utterance. The encoder must be unidirectional.
        """
        assert not self.bidirectional, "a bidirectional memory cannot be streamed"
        carried = iter(state or [None] * (len(self.convolutions) + len(self.blocks)))
        after: StreamState = []
        states = features
        for convolution in self.convolutions:
            states, inputs = convolution(states, next(carried))
            after.append(inputs)
        states = self.dropout(self.enter(states))
        for block in self.blocks:
            assert isinstance(block, ParallelLMUBlock)
            states, memory = block.stream(states, next(carried))
            after.append(memory)
        return self.leave(states), after


class ChannelDropout(Dropout):
    """Drops whole channels, with one mask for all time steps (Gal and Ghahramani, NeurIPS 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * dropout_mask((len(x), 1, x.shape[2]), self.p, x)


class CausalConvolution(nn.Module):
    """Applies a convolution over time, then GELU: T inputs -> ceil(T / stride) outputs.

    Output t depends on inputs up to input t * stride.
    """

    def __init__(self, num_inputs: int, num_outputs: int, stride: int, kernel_size: int = 5) -> None:
        super().__init__()
        self.stride = stride
        self.convolution = nn.Conv1d(num_inputs, num_outputs, kernel_size, stride)

    def forward(self, x: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the outputs, and the last inputs, which the next call needs.

        x: (B, T, num_inputs). inputs: the previous call's last inputs, (B, n, num_inputs), or None at the start of an
        utterance.
        """
        (kernel_size,) = self.convolution.kernel_size
        if inputs is None:
            inputs = x.new_zeros(x.shape[0], kernel_size - 1, x.shape[2])
        x = torch.cat([inputs, x], dim=1)
        num_outputs = max(0, (x.shape[1] - kernel_size) // self.stride + 1)
        if num_outputs == 0:
            return x.new_zeros(x.shape[0], 0, self.convolution.out_channels), x
        return F.gelu(self.convolution(x.transpose(1, 2))).transpose(1, 2), x[:, num_outputs * self.stride :]


class ParallelLMUBlock(nn.Module):
    """Computes x + LMU(norm(x)), then x + feed_forward(norm(x)), and applies dropout to both updates."""

    def __init__(
        self, width: int, memory_size: int, theta: float, channels: int, bidirectional: bool, dropout: float
    ) -> None:
        super().__init__()
        self.lmu_norm = nn.LayerNorm(width)
        self.lmu = ParallelLMU(
            width, width, memory_size, theta,
            channels=channels, bidirectional=bidirectional, signal_activation=nn.Identity(), activation=F.gelu,
        )  # fmt: skip
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = ChannelDropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Applies the block to x, (B, T, width). mask: (B, T) bool, False at time steps to exclude from memories."""
        return self._after_lmu(x, self.lmu(self.lmu_norm(x), mask))

    def stream(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Applies the block to the next time steps, (B, T, width) with T >= 0; returns the result and the new memory.

        memory: returned by the previous call, or None at the start.
        """
        if x.shape[1] == 0:
            return x, memory
        mixed, memory = self.lmu.stream(self.lmu_norm(x), memory)
        return self._after_lmu(x, mixed), memory

    def _after_lmu(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(x))
