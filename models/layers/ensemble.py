"""Several classifiers as one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def log_mean_probabilities(logits: Tensor) -> Tensor:
    """The logarithm of the mean of several classifiers' probabilities: (B, members, C) -> (B, C), float32 or wider.

    Half precision would round the probabilities away that a mean consists of.
    """
    each = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=2)
    num_members = logits.shape[1]
    return each.squeeze(1) if num_members == 1 else each.logsumexp(dim=1) - math.log(num_members)


class Ensemble(nn.Module):
    """The logarithm of the mean of the members' probabilities.

    The members take the same x and return logits (B, C). So does this: a softmax over its output, of the same shape,
    is the mean of theirs. float32 or wider.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return log_mean_probabilities(torch.stack([member(x) for member in self.members], dim=1))
