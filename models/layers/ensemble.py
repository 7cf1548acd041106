"""Averages the probabilities of several classifiers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def log_mean_probabilities(logits: Tensor) -> Tensor:
    """Returns the log of mean probabilities in at least float32, from logits: (B, num_classifiers, C) -> (B, C).

    Half precision would round small probabilities to 0.
    """
    each = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=2)
    num_members = logits.shape[1]
    return each.squeeze(1) if num_members == 1 else each.logsumexp(dim=1) - math.log(num_members)


class Ensemble(nn.Module):
    """Computes the log of the members' mean probabilities, (B, C) in at least float32.

    Each member maps x to logits, (B, C).
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return log_mean_probabilities(torch.stack([member(x) for member in self.members], dim=1))
