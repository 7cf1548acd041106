"""Buffers of a module that forwards change, put back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """After it all buffers of the module hold what they held before, on whatever device it is then."""
    before = [buffer.detach().clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)
