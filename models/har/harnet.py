"""HarNet: an ensemble of small convolutional networks for windows of inertial signals."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from models.layers.ensemble import log_mean_probabilities

Mode = Literal["early", "flatten", "average", "first"]

NUM_MOVEMENT_CHANNELS = 6
"""Number of leading channels that measure movement, without gravity: three of acceleration and three of rotation."""
SMALL_MOVEMENT = 0.03
"""Signal value, in standard deviations, up to which asinh scaling is approximately linear."""


class HarNet(nn.Module):
    """Classifies windows of inertial signals: `logits = model(x)`, x (B, num_channels, T) -> (B, num_classes).

    The model is a deep ensemble (Lakshminarayanan et al., 2017): it consists of several small networks, its members,
    which get the same windows and share no parameters. Each member is trained on its own loss (`member_logits`), and
    `forward` averages the members' probabilities.

    A sample's logits do not depend on other samples. Windows can have any length T.

    mode: how channels are combined.
        "early": the first convolution gets all channels; this is the most accurate mode.
        "flatten": one encoder is applied to each channel separately, and features are concatenated.
        "average": one encoder is applied to each channel separately, and features are averaged.
        "first": the encoder gets only channel 0.
    hidden_dims: widths of the hidden layers of each member's head; if empty, the heads are linear.
    dropout: dropout probability after each hidden layer.
    widths: channels of each member's convolutions, multiples of 8; each convolution halves the time axis.
    """

    def __init__(
        self,
        mode: Mode = "early",
        num_channels: int = 9,
        num_classes: int = 6,
        hidden_dims: Sequence[int] = (128,),
        dropout: float = 0.2,
        widths: Sequence[int] = (32, 48, 64),
        num_members: int = 4,
    ) -> None:
        super().__init__()
        if mode not in get_args(Mode):
            raise ValueError(f"mode {mode!r}: must be one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self._encoder_is_frozen = False
        self.encoder = Encoder(num_channels if mode == "early" else 1, widths, num_members)
        num_features = self.encoder.num_features * (num_channels if mode == "flatten" else 1)
        self.heads = nn.ModuleList(_head(num_features, num_classes, hidden_dims, dropout) for _ in range(num_members))

    def forward(self, x: Tensor) -> Tensor:
        return log_mean_probabilities(self.member_logits(self.features(x)))

    @property
    def blocks(self) -> list[nn.Module]:
        """Returns the encoder, which contains the convolutions of all members, and each member's head."""
        return [self.encoder, *self.heads]

    def features(self, x: Tensor) -> Tensor:
        """Returns the inputs of the members' heads: (B, num_members, num_features)."""
        features: Tensor
        if self.mode == "early":
            features = self.encoder(x)
        elif self.mode == "first":
            features = self.encoder(x[:, :1])
        else:
            # the encoder treats each channel as a sample
            per_channel = self.encoder(x.flatten(0, 1).unsqueeze(1)).unflatten(0, x.shape[:2])
            features = per_channel.transpose(1, 2).flatten(2) if self.mode == "flatten" else per_channel.mean(1)
        return features

    def member_logits(self, features: Tensor) -> Tensor:
        """Returns the logits of each member: (B, num_members, num_classes)."""
        return torch.stack([head(features[:, i]) for i, head in enumerate(self.heads)], dim=1)

    def freeze_encoder(self) -> None:
        """Freezes the encoder and keeps it in eval mode."""
        self._encoder_is_frozen = True
        self.encoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "HarNet":
        super().train(mode)
        if self._encoder_is_frozen:
            self.encoder.eval()
        return self


class Encoder(nn.Module):
    """Applies strided convolutions, then pools over time: (B, C, T) -> (B, num_members, num_features).

    Features are the mean and the maximum over time. The first six channels are used twice: unchanged, and on an asinh
    scale that enlarges small movements.
    """

    def __init__(self, num_channels: int, widths: Sequence[int], num_members: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        num_channels += min(num_channels, NUM_MOVEMENT_CHANNELS)
        groups = 1  # all members share the input channels
        for width, kernel_size in zip(widths, (9, 5, *[3] * len(widths)), strict=False):
            # no bias, because the following normalisation has a bias
            conv = nn.Conv1d(
                num_channels, num_members * width, kernel_size, stride=2, padding=kernel_size // 2, groups=groups,
                bias=False,
            )  # fmt: skip
            layers += [conv, nn.GroupNorm(8 * num_members, num_members * width), nn.GELU()]
            num_channels, groups = num_members * width, num_members
        self.layers = nn.Sequential(*layers)
        self.num_members = num_members
        self.num_features = 2 * widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(with_small_movements(x)).unflatten(1, (self.num_members, -1))
        return torch.cat([h.mean(-1), h.amax(-1)], dim=-1)


def with_small_movements(x: Tensor) -> Tensor:
    """Appends asinh(x / 0.03) / 3 for the first six channels of standardised x: (B, C, T) -> (B, C + min(C, 6), T).

    Signals of standing and sitting differ by only hundredths of a standard deviation.
    """
    return torch.cat([x, torch.asinh(x[:, :NUM_MOVEMENT_CHANNELS] / SMALL_MOVEMENT) / 3], dim=1)


def _head(num_features: int, num_classes: int, hidden_dims: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden_dims:
        layers += [nn.Linear(num_features, width, bias=False), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout)]
        num_features = width
    return nn.Sequential(*layers, nn.Linear(num_features, num_classes))
