"""A number for the content of many tensors, which says where they are the same to the bit."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK, BLOCK_IN_CACHE = 2**20, 2**15
"""Words that are multiplied at once: on a GPU, where it takes 20 MiB beside the model, and on the CPU."""
_BLOCK_FACTOR = 0x5851F42D4C957F2D
"""Any odd number would do; this one is Knuth's for a generator modulo 2^64."""


class Fingerprint:
    """The multilinear hash of Lemire and Kaser ("Strongly universal string hashing is fast", 2014) on a device.

    The memory of the tensors is a row of 32-bit words, the hash their sum modulo 2^64, each times a random number that
    belongs to its place. The numbers are odd, so that a single word that differs always shows; of other differences
    one in 2^32 does not. Sums of integers do not depend on their order, so every device finds the same.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        """num_words: of the tensors together."""
        size = min(num_words, BLOCK_IN_CACHE if device.type == "cpu" else BLOCK)
        generator = torch.Generator().manual_seed(0)
        self._factors = (torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator) | 1).to(device)

    @torch.no_grad()
    def of(self, tensors: Iterable[Tensor]) -> Tensor:
        """The hash, int64 without a dimension, on the device."""
        total = self._factors.new_zeros(())
        for block in _blocks(tensors, len(self._factors)):
            total = total * _BLOCK_FACTOR + (block * self._factors[: len(block)]).sum()
        return total


def num_words(tensors: Iterable[Tensor]) -> int:
    """At least so many words are hashed of them."""
    return sum(-(-tensor.nbytes // 4) + 1 for tensor in tensors)


def _words(tensor: Tensor) -> Tensor:
    """Its memory, filled up with zeros to whole words."""
    flat = tensor.detach().reshape(-1)
    if flat.element_size() % 4:
        flat = F.pad(flat.view(torch.uint8), (0, 4 - flat.nbytes % 4))
    return flat.view(torch.int32)


def _blocks(tensors: Iterable[Tensor], most: int) -> Iterator[Tensor]:
    """Their words one after another, at most so many at a time: a few operations for many small tensors."""
    waiting: list[Tensor] = []
    size = 0
    for piece in (piece for tensor in tensors for piece in _words(tensor).split(most)):
        if size + len(piece) > most:
            yield torch.cat(waiting)
            waiting, size = [], 0
        waiting.append(piece)
        size += len(piece)
    if waiting:
        yield torch.cat(waiting)
