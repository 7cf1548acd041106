"""A run inside a process that goes on afterwards: everything global that it changes is put back."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainer.loading.errors import BadInput
from trainer.parallel.signals import handlers_restored

_in_use = threading.Lock()

_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)
"""What reads something global, and what writes it."""


@contextmanager
def process_restored(wait_s: float = 0.0) -> Iterator[None]:
    """Around a run. Its floating-point numbers are those of a new process, whatever default this one has.

    Raises BadInput if another thread of this process is within it for longer than `wait_s`: they would share random
    numbers.
    """
    if not _in_use.acquire(timeout=wait_s):
        raise BadInput("this process trains already, and one run at a time is all it can; start another process")
    path, workspace = list(sys.path), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    before = [(write, read()) for read, write in _STATES]
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    gpu = torch.cuda.current_device() if gpus else None
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmarks = torch.backends.cudnn.benchmark
    try:
        with handlers_restored(), torch.random.fork_rng(gpus):
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        for write, value in before:
            write(value)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmarks
        if gpu is not None:
            torch.cuda.set_device(gpu)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        sys.path[:] = path
        _in_use.release()
