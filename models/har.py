"""Convolutional networks for windows of inertial signals."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Mode = Literal["early", "flatten", "average", "first"]


class HarNet(nn.Module):
    """Classifies windows of inertial signals: `logits = model(x)`, x (B, num_channels, T) -> (B, num_classes).

    Every layer normalises within a sample (GroupNorm, LayerNorm), so that what a sample gets does not depend on
    the samples beside it. T is at least 8; any length works, because features are pooled over time.

    mode: how the channels meet.
        "early": the first convolution sees all channels. The accurate one.
        "flatten": one single-channel encoder, shared by the channels; their features are concatenated.
        "average": the same, features averaged over the channels.
        "first": the same, of channel 0 alone.
    hidden_dims: widths of the hidden layers of the head; () for a linear head.
    dropout: rate after each hidden layer.
    widths: of the encoder's layers, each of which halves the time axis; a multiple of 8 each. None: (64, 64, 128)
        in mode "early", half of that in the others, whose encoder runs once for every channel.
    """

    def __init__(
        self,
        mode: Mode = "early",
        num_channels: int = 9,
        num_classes: int = 6,
        hidden_dims: Sequence[int] = (128,),
        dropout: float = 0.2,
        widths: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if mode not in get_args(Mode):
            raise ValueError(f"mode {mode!r}: must be one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self._encoder_is_frozen = False
        if widths is None:
            widths = (64, 64, 128) if mode == "early" else (32, 32, 64)
        self.encoder = Encoder(num_channels if mode == "early" else 1, widths)
        num_features = self.encoder.num_features * (num_channels if mode == "flatten" else 1)
        self.head = _head(num_features, num_classes, hidden_dims, dropout)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits

    def features(self, x: Tensor) -> Tensor:
        """What the head sees of the windows: (B, num_features)."""
        features: Tensor
        if self.mode == "early":
            features = self.encoder(x)
        elif self.mode == "first":
            features = self.encoder(x[:, :1])
        else:
            # Channels become samples, so that one encoder sees each of them alone.
            per_channel = self.encoder(x.flatten(0, 1).unsqueeze(1)).view(*x.shape[:2], -1)
            features = per_channel.flatten(1) if self.mode == "flatten" else per_channel.mean(1)
        return features

    def freeze_encoder(self) -> None:
        """The encoder is not trained, and is in eval mode whatever the mode of the rest."""
        self._encoder_is_frozen = True
        self.encoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "HarNet":
        super().train(mode)
        if self._encoder_is_frozen:
            self.encoder.eval()
        return self


class Encoder(nn.Module):
    """Strided convolutions, then mean and maximum over time: (B, C, T) -> (B, num_features)."""

    def __init__(self, num_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, kernel_size in zip(widths, (9, 5, *[3] * len(widths)), strict=False):
            # No bias: the normalisation that follows would cancel it.
            conv = nn.Conv1d(num_channels, width, kernel_size, stride=2, padding=kernel_size // 2, bias=False)
            layers += [conv, nn.GroupNorm(8, width), nn.GELU()]
            num_channels = width
        self.layers = nn.Sequential(*layers)
        self.num_features = 2 * num_channels

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        return torch.cat([h.mean(-1), h.amax(-1)], dim=-1)


def _head(num_features: int, num_classes: int, hidden_dims: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden_dims:
        layers += [nn.Linear(num_features, width, bias=False), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout)]
        num_features = width
    return nn.Sequential(*layers, nn.Linear(num_features, num_classes))
