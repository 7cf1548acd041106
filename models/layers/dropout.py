"""Dropout (Srivastava et al., JMLR 2014) that is quick on a CPU too."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 2**16


class Dropout(nn.Module):
    """nn.Dropout, with another source of noise on the CPU, where the model would else wait for its masks.

    There torch draws one Bernoulli number after the other, at 20 ns each on one thread: as long as the rest of an
    attention layer takes. Here four elements share a random 64-bit word, 16 bits each, which rounds p to a multiple
    of 2^-16; the scale is that of the rounded p, so that the mean is kept exactly.
    """

    def __init__(self, p: float) -> None:
        """p: the probability of an element to become 0, in [0, 1)."""
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; the identity in eval mode."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        num_dropped = round(self.p * _LEVELS)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        keep = words.view(torch.int16)[: x.numel()] >= num_dropped - _LEVELS // 2
        scale = x.new_tensor([_LEVELS / (_LEVELS - num_dropped)])
        return x * torch.where(keep, scale, 0).view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"
