"""torch's DistributedDataParallel without the import of torch's compiler, the longest part of a start."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

COMPILER = "torch._dynamo"


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """The same, but it imports the compiler neither when it is made nor in its forward.

    It would look up one setting there, and tell the compiler of itself, which matters where that is in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _default_settings_of_compiler():
            super().__init__(*args, **kwargs)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return super()._run_ddp_forward(*args, **kwargs)
        return self.module(*args, **kwargs)


@contextmanager
def _default_settings_of_compiler() -> Iterator[None]:
    """Within it, unless the compiler is imported, what torch looks up of it is a default."""
    if COMPILER in sys.modules:
        yield
        return
    torch._dynamo = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo  # torch finds the module by itself as soon as it is asked for
