"""Convolutional networks for windows of inertial signals."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from models.layers.ensemble import log_mean_probabilities

Mode = Literal["early", "flatten", "average", "first"]

NUM_MOVEMENT_CHANNELS = 6
"""The first channels are acceleration without gravity and rotation; those with gravity contain no other movement."""
SMALL_MOVEMENT = 0.03
"""Scale in standard deviations below which the second view of a channel is linear, above logarithmic."""


class HarNet(nn.Module):
    """Classifies windows of inertial signals: `logits = model(x)`, x (B, num_channels, T) -> (B, num_classes).

    It contains several small networks, its members, which see the same windows and share nothing. Each has its own loss
    (`member_logits`); the output averages their probabilities (deep ensembles: Lakshminarayanan et al., 2017). They are
    computed in parallel, as groups of one convolution.

    Every layer normalises within a sample and member (GroupNorm, LayerNorm), so samples do not affect each other. T is
    at least 8; any length works, because features are pooled over time.

    mode: how channels are combined.
        "early": the first convolution sees all channels; the most accurate.
        "flatten": a shared single-channel encoder; features are concatenated.
        "average": a shared single-channel encoder; features are averaged.
        "first": the encoder sees channel 0 only.
    hidden_dims: hidden layer widths of each member's head; () for a linear head. dropout: rate after each hidden layer.
    widths: of each member's convolutions, which each halve the time axis; multiples of 8.
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
        """Returns the encoder, with the convolutions of all members, and the members' heads."""
        return [self.encoder, *self.heads]

    def features(self, x: Tensor) -> Tensor:
        """Returns the input of the members' heads: (B, num_members, num_features)."""
        features: Tensor
        if self.mode == "early":
            features = self.encoder(x)
        elif self.mode == "first":
            features = self.encoder(x[:, :1])
        else:
            # channels become samples of a single-channel encoder
            per_channel = self.encoder(x.flatten(0, 1).unsqueeze(1)).unflatten(0, x.shape[:2])
            features = per_channel.transpose(1, 2).flatten(2) if self.mode == "flatten" else per_channel.mean(1)
        return features

    def member_logits(self, features: Tensor) -> Tensor:
        """features: from `features`. Returns (B, num_members, num_classes)."""
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
    """Strided convolutions, then mean and maximum over time: (B, C, T) -> (B, num_members, num_features).

    The first six channels enter twice: unchanged, and on a nearly logarithmic scale that shows small movements.
    """

    def __init__(self, num_channels: int, widths: Sequence[int], num_members: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        num_channels += min(num_channels, NUM_MOVEMENT_CHANNELS)
        groups = 1  # all members share the input channels
        for width, kernel_size in zip(widths, (9, 5, *[3] * len(widths)), strict=False):
            # without bias, which the following normalisation would cancel
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
    """Appends asinh(x / 0.03) / 3 of the first six channels: (B, C, T) in standard deviations -> (B, C + min(C, 6), T).

    Standing and sitting differ by movements of hundredths of a standard deviation, which gravity would hide.
    """
    return torch.cat([x, torch.asinh(x[:, :NUM_MOVEMENT_CHANNELS] / SMALL_MOVEMENT) / 3], dim=1)


def _head(num_features: int, num_classes: int, hidden_dims: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden_dims:
        layers += [nn.Linear(num_features, width, bias=False), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout)]
        num_features = width
    return nn.Sequential(*layers, nn.Linear(num_features, num_classes))
