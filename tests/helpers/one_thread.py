"""Context manager for tests whose tensors are so small that a second thread only slows them down."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
