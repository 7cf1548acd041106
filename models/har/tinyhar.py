"""TinyHAR: a lightweight model for windows of inertial signals (Zhou et al., ISWC 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.dropout import Dropout

_KERNEL_SIZE = 5
_STRIDES = (1, 2, 1, 2)
_NUM_FILTERS = 24


class TinyHar(nn.Module):
    """Classifies windows of inertial signals: `logits = model(x)`, x (B, num_channels, T) -> (B, num_classes).

    The model has convolutions shared by all channels, attention between the channels of a time step, a linear layer
    that fuses the channels, an LSTM over time, and attentive pooling of the LSTM's states. Four convolutions with
    strides 1, 2, 1, 2 shorten T to ceil(T / 4). The model has 42,704 parameters for 9 channels and 6 classes.

    The architecture combines the variants attn, FC, lstm and tnaive of the authors' code (teco-kit/ISWC22-HAR), with 24
    filters. Unlike the authors' code, this model pads convolutions, and also applies dropout before the classifier.

    The model uses batch norm, as published, so in training a window's logits depend on the other windows of the
    micro-batch; in eval mode they do not.

    A learned gate scales the output of each attention module. Gates are initialised to 0, so the other weights of these
    modules have zero gradient in the first training step.

    dropout: probability in [0, 1), applied after the attention between channels and before the classifier.
    """

    def __init__(self, num_channels: int = 9, num_classes: int = 6, dropout: float = 0.5) -> None:
        super().__init__()
        width = 2 * _NUM_FILTERS
        self.encoder = _encoder()
        self.channel_attention = ChannelAttention(_NUM_FILTERS)
        self.fusion = nn.Linear(num_channels * _NUM_FILTERS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.pooling = AttentivePooling(width)
        self.classifier = nn.Linear(width, num_classes)
        self.dropout = Dropout(dropout)

    @property
    def blocks(self) -> list[nn.Module]:
        """Returns the convolutions, the attention between channels, and the LSTM."""
        return [self.encoder, self.channel_attention, self.lstm]

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x.unsqueeze(1))  # (B, filters, channels, steps)
        mixed = self.dropout(self.channel_attention(features.permute(0, 3, 2, 1)))
        fused = self.fusion(mixed.flatten(2)).relu()
        states, _ = self.lstm(fused)
        return self.classifier(self.dropout(self.pooling(states)))


def _encoder() -> nn.Sequential:
    """Builds convolutions (B, 1, channels, T) -> (B, filters, channels, steps) that do not mix channels."""
    layers: list[nn.Module] = []
    num_inputs = 1
    for stride in _STRIDES:
        # with bias, because a ReLU precedes the batch norm
        conv = nn.Conv2d(
            num_inputs, _NUM_FILTERS, (1, _KERNEL_SIZE), stride=(1, stride), padding=(0, _KERNEL_SIZE // 2)
        )
        layers += [conv, nn.ReLU(), nn.BatchNorm2d(_NUM_FILTERS)]
        num_inputs = _NUM_FILTERS
    return nn.Sequential(*layers)


class ChannelAttention(nn.Module):
    """Computes x + gate * attention(x) between the channels of each time step; logits are not scaled, as published.

    The authors' code calls `query` "key", and applies softmax over the other dimension of the logits.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Applies attention to x, (B, steps, channels, width)."""
        mixed = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), scale=1.0)
        return x + self.gate * mixed


class AttentivePooling(nn.Module):
    """Computes last state + gate * mean of states weighted by softmax(v . tanh(W state + b)) over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> Tensor:
        """Pools states over time: (B, steps, width) -> (B, width)."""
        weights = self.score(self.hidden(states).tanh()).softmax(dim=1)
        return states[:, -1] + self.gate * (weights * states).sum(dim=1)
