"""Several classifiers as one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """The logarithm of the mean of the members' probabilities.

    The members take the same x and return logits (B, C). So does this: a softmax over its output, of the same shape,
    is the mean of theirs. float32 or wider.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.stack([_log_probabilities(member(x)) for member in self.members]).logsumexp(dim=0)
        return total - math.log(len(self.members))


def _log_probabilities(logits: Tensor) -> Tensor:
    """Half precision would round the probabilities away that a mean consists of."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)
