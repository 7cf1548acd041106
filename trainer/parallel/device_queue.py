"""The work that the host has asked of its device: when it is done, and how to learn of it without waiting."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Steps after which whatever a step left on a GPU has long since arrived on the host."""


class DeviceQueue:
    """The queue of a device that is never behind the host, as the CPU: whatever the host asked for is done.

    lag: steps after which the host can look at what a step left without waiting. pins_memory: whether what the host
    sends does not wait for the device if it lies in pinned memory.
    """

    pins_memory = False

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag

    def mark(self) -> Callable[[], bool]:
        """Marks this moment in the work of the device; the function returns whether it has come."""
        return lambda: True

    def fetch(self, value: Tensor) -> Callable[[], Any]:
        """Starts to copy a tensor to the host; the function returns it as `Tensor.tolist`, and waits if need be."""
        return value.tolist

    def instant(self) -> Any:
        """This moment in the work of the device, for `seconds`."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """The time from one instant to a later one; waits until the later one has come."""
        return float(end - start)

    def drain(self, within_s: float) -> None:
        """Waits until the device has done what it can do without other processes, but no longer than that."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it this thread gives the device work that does not wait for what it was asked before."""
        yield


class CudaQueue(DeviceQueue):
    """The queue of a GPU: events lie among its kernels."""

    pins_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(GROUP_SIZE)
        self._device = device

    def mark(self) -> Callable[[], bool]:
        return self._event().query

    def fetch(self, value: Tensor) -> Callable[[], Any]:
        content = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        content.copy_(value, non_blocking=True)
        arrived = self._event()

        def wait() -> Any:
            arrived.synchronize()
            return content.tolist()

        return wait

    def instant(self) -> Any:
        return self._event(enable_timing=True)

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def drain(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        stream = torch.cuda.default_stream(self._device)
        while not stream.query() and time.monotonic() < deadline:
            time.sleep(0.01)

    @contextmanager
    def aside(self) -> Iterator[None]:
        # The current device is a thread's own, and would be the first GPU, perhaps another job's.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield

    def _event(self, enable_timing: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=enable_timing)
        event.record(torch.cuda.current_stream(self._device))
        return event


def queue_of(device: torch.device) -> DeviceQueue:
    """The queue of a device."""
    if device.type == "cuda":
        return CudaQueue(device)
    return DeviceQueue(0 if device.type == "cpu" else GROUP_SIZE)
