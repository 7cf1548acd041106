"""Devices: which ones a command line names, how a process uses the host, and what a device has still to do."""

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Steps after which whatever a step left on a GPU has long since arrived on the host."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_LARGEST_MMAP_THRESHOLD = 2**25


def usable_gpus(device: str, gpu_ids: Sequence[int] | None) -> list[int]:
    """The GPUs that runs on several devices may use; none where they train on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return []
    return list(gpu_ids or range(torch.cuda.device_count()))


def pick_device(name: str) -> torch.device:
    """`--device` -> a device with its index."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    _, _, index = name.partition(":")
    return torch.device("cuda", int(index or 0))


def set_num_threads(
    requested: int | None, local_world_size: int, device: torch.device, takes_one: bool = False
) -> None:
    """CPU threads of this process, which computes on a device. takes_one: as beside a GPU unless the user says more.

    Beside a GPU one is enough: the host only starts its work, makes batches as its workers do, by one thread each, and
    more would wait for each other at every small operation. torchrun sets OMP_NUM_THREADS=1 for processes whose user
    said nothing, which would leave cores idle.
    """
    launcher_chose = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    user_chose = "OMP_NUM_THREADS" in os.environ and not launcher_chose
    takes_one |= device.type == "cuda"
    if requested is None and not user_chose and (takes_one or local_world_size > 1):
        requested = 1 if takes_one else max(1, num_cores() // local_world_size)
    if requested is not None:
        torch.set_num_threads(requested)


def keep_freed_memory() -> None:
    """Lets this process reuse what its tensors free, where its C library is glibc.

    By default glibc returns freed memory at the end of its heap to the kernel, and every step pays for page faults to
    get it back. Blocks of more than 32 MiB are still returned. A process cannot read what was set before, to restore
    it: this is for processes that do nothing but train.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def half_precision(device: torch.device) -> str:
    """The half precision in which a device is fast: "bf16", "fp16" or, where none is, "off".

    GPUs have bf16 in hardware from compute capability 8.0 on, and fp16 before. A CPU without instructions for bf16 is
    about ten times slower in it than in float32.
    """
    if device.type != "cuda":
        return "off"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def numbers_at_once(device: torch.device) -> int:
    """The length of a vector for one operation: on a CPU it stays in the cache, on a GPU its launch hardly counts."""
    return 2**15 if device.type == "cpu" else 2**20


def arithmetic_of(device: torch.device) -> str:
    """What decides about the last bits of a result: devices for which it is the same compute the same."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()} and {torch.get_num_threads()} thread(s)"


def device_label(device: torch.device) -> str:
    """A device as the user knows it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


# --- what a device has still to do -------------------------------------------------------------------------------


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
        self._stream: torch.cuda.Stream | None = None  # of the last mark

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
        stream = self._stream or torch.cuda.default_stream(self._device)
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
        self._stream = torch.cuda.current_stream(self._device)
        event.record(self._stream)
        return event


def queue_of(device: torch.device) -> DeviceQueue:
    """The queue of a device."""
    if device.type == "cuda":
        return CudaQueue(device)
    return DeviceQueue(0 if device.type == "cpu" else GROUP_SIZE)
