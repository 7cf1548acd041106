"""A run inside a process that goes on afterwards: what it changes globally is put back, but the compiler's settings."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from trainer.commands.build import CUBLAS_WORKSPACE
from trainer.common.errors import UserError
from trainer.parallel.signals import handlers_restored

_in_use = threading.Lock()


def _tf32_of_cudnn() -> tuple[bool | None, tuple[str, ...]]:
    """By torch's older switch; where newer ones, of torch 2.9, differ from each other, it raises, and they count."""
    cudnn: Any = torch.backends.cudnn
    try:
        return cudnn.allow_tf32, ()
    except RuntimeError:
        return None, (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)


def _set_tf32_of_cudnn(before: tuple[bool | None, tuple[str, ...]]) -> None:
    cudnn: Any = torch.backends.cudnn
    is_allowed, precisions = before
    if is_allowed is None:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = precisions
    else:
        cudnn.allow_tf32 = is_allowed


_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_tf32_of_cudnn, _set_tf32_of_cudnn),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)
"""What reads something global, and what writes it."""
_SWITCHES = ((torch.utils.deterministic, "fill_uninitialized_memory"), (torch.backends.cudnn, "benchmark"))


@contextmanager
def process_restored(wait_s: float = 0.0) -> Iterator[None]:
    """Around a run. Default dtype and device and gradients are those of a new process, whatever this one has.

    Raises UserError if another thread of this process is within it for longer than `wait_s`: they would share random
    numbers.
    """
    if not _in_use.acquire(timeout=wait_s):
        raise UserError("this process trains already, and one run at a time is all it can; start another process")
    with ExitStack() as afterwards:
        afterwards.callback(_in_use.release)
        for read, write in _STATES:
            afterwards.callback(write, read())
        for module, name in _SWITCHES:
            afterwards.callback(setattr, module, name, getattr(module, name))
        afterwards.callback(sys.path.__setitem__, slice(None), list(sys.path))
        if CUBLAS_WORKSPACE not in os.environ:
            afterwards.callback(os.environ.pop, CUBLAS_WORKSPACE, None)
        uses_gpus = torch.cuda.is_initialized()
        afterwards.callback(_make_current, torch.cuda.current_device() if uses_gpus else 0)
        afterwards.enter_context(torch.random.fork_rng(range(torch.cuda.device_count()) if uses_gpus else ()))
        afterwards.enter_context(handlers_restored())
        torch.set_default_dtype(torch.float32)
        afterwards.enter_context(torch.inference_mode(False))  # gradients too, also within torch.no_grad()
        if torch.get_default_device().type != "cpu":  # a context costs every operation some time
            afterwards.enter_context(torch.device("cpu"))
        yield


def _make_current(gpu: int) -> None:
    """For torch; 0 is its own choice. Nothing where this process has used none, which would begin to use one."""
    if torch.cuda.is_initialized():
        torch.cuda.set_device(gpu)
