"""Tensors on their way to the host."""

from typing import Any

import torch
from torch import Tensor


class Arrival:
    """A tensor whose content the host will want later: it waits for the device only if it asks too early."""

    def __init__(self, value: Tensor) -> None:
        self._content = value
        self._arrived: torch.cuda.Event | None = None
        if value.is_cuda:
            self._content = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._content.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))

    def content(self) -> Any:
        """As `Tensor.tolist`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._content.tolist()
