"""A copy of a run's state in host memory, which can be written while training goes on."""

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN_MAPPINGS = (dict, OrderedDict, Counter)
"""Mappings that can be read from a file without executing anything."""


def snapshot(state: dict[str, Any], reusable: dict[str, Any] | None = None, page_locked: bool = True) -> dict[str, Any]:
    """The state with every tensor copied into host memory; what was one tensor under two names stays one.

    A number of numpy becomes Python's own: what a task computes may be one without anybody noticing (`np.float64` is a
    float), and a file with one cannot be read without executing what it says.

    reusable: an older snapshot that nobody needs any more. Its memory is used again, which is several times faster than
    memory fresh from the system. From a GPU everything is copied at once, into page-locked memory, and waited for once;
    what finds no room there is copied into other memory, which takes longer, and so is everything without page_locked.
    """
    buffers = defaultdict(list)
    for buffer in tensors_of(reusable):
        buffers[_kind(buffer)].append(buffer)
    copies: dict[Any, Tensor] = {}

    def copy_tensor(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.detach().to("cpu", copy=True)
        key = (tensor.device, tensor.data_ptr(), _kind(tensor))
        if key not in copies:
            fitting = buffers[_kind(tensor)]
            buffer = fitting.pop() if fitting else _new_buffer(tensor, page_locked)
            copies[key] = buffer.copy_(tensor.detach(), non_blocking=True)
        return copies[key]

    copied = with_tensors_replaced(state, copy_tensor)
    for device in {device for device, *_ in copies}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copied


def _new_buffer(tensor: Tensor, page_locked: bool) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda and page_locked)
    except RuntimeError:  # the system, or its administrator, bounds what may be locked
        return torch.empty_like(tensor, device="cpu")


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a state; one under two names counts once."""
    found: dict[int, Tensor] = {}
    with_tensors_replaced(state, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def state_bytes(state: Any) -> int:
    """Bytes of the tensors of a state."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors must have in common to be copied into each other's memory."""
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.layout == torch.strided else None


def with_tensors_replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested mappings, lists and tuples, with another tensor in the place of each."""
    if isinstance(value, Tensor):
        return replace(value)
    if type(value) in PLAIN_MAPPINGS:
        replaced = copy.copy(value)  # a state dict carries attributes too
        for name, item in value.items():
            replaced[name] = with_tensors_replaced(item, replace)
        return replaced
    if type(value) in (list, tuple):
        return type(value)(with_tensors_replaced(item, replace) for item in value)
    return value.item() if isinstance(value, np.generic) else value
