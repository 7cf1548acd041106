"""Standardisation of inputs in physical units."""

import numpy as np
import torch
from torch import Tensor, nn


class Standardised(nn.Module):
    """Computes `network((x - mean) / std)` for x (B, num_channels, T) in physical units.

    Mean and standard deviation are stored in the state dict, so a trained model accepts raw signals. Before
    `set_statistics` or a state dict sets them, the mean is 0 and the standard deviation is 1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, num_channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_channels, 1))
        self.register_buffer("std", torch.ones(num_channels, 1))
        self.network = network

    def set_statistics(self, mean: np.ndarray, std: np.ndarray) -> None:
        """Sets mean and standard deviation of the input. mean, std: (num_channels,); std must be above 0."""
        self.mean.copy_(torch.from_numpy(mean)[:, None])
        self.std.copy_(torch.from_numpy(std)[:, None])

    def standardise(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(self.standardise(x))
        return logits
