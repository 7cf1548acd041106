"""Buffers of a module that forwards change, put back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """After it all buffers of the module hold what they held before, on whatever device it is then."""
    before = [buffer.detach().clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.data.copy_(value)  # unseen by autograd, whose backward may be under way
