"""torch's DistributedDataParallel without the import of torch's compiler, the longest part of a start."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

COMPILER = "torch._dynamo"


class LightDistributedDataParallel(nn.parallel.DistributedDataParallel):
    """It imports the compiler neither when it is made nor in its forward.

    torch's own looks up one setting there, and tells the compiler of itself, which matters where that is in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _default_settings_of_compiler():
            super().__init__(*args, **kwargs)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return super()._run_ddp_forward(*args, **kwargs)
        return self.module(*args, **kwargs)


class _StandIn:
    """Has some attributes of a module, which is imported if another one is asked for."""

    def __init__(self, module: str, **known: Any) -> None:
        self.__dict__.update(known)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


@contextmanager
def _default_settings_of_compiler() -> Iterator[None]:
    """Within it, unless the compiler is imported, torch finds the default of its setting for this wrapper."""
    if COMPILER in sys.modules:
        yield
        return
    utils = _StandIn(f"{COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in = _StandIn(COMPILER, utils=utils)
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stand_in:  # and no other thread has imported it
            del vars(torch)["_dynamo"]  # torch finds the module by itself as soon as it is asked for
