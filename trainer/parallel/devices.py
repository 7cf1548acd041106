"""Selects devices, configures CPU threads and host memory, and observes the devices' work queues."""

import ctypes
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from trainer.parallel.environment import is_under_torchrun

LAG_STEPS = 32
"""Number of steps by which the host delays reading a step's results from a GPU, so that it need not wait."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers of glibc's `mallopt` (malloc.h)."""
_LARGEST_MMAP_THRESHOLD = 2**25


def usable_gpus(device: str, gpu_ids: Sequence[int] | None) -> list[int]:
    """Returns the indices of the GPUs for a multi-device run; empty if the run trains on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return []
    return list(gpu_ids or range(torch.cuda.device_count()))


def pick_device(name: str) -> torch.device:
    """Converts the value of `--device` to a `torch.device`; a GPU always has an index."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    _, _, index = name.partition(":")
    return torch.device("cuda", int(index or 0))


def set_num_threads(requested: int | None, num_cores: int, device: torch.device, takes_one: bool = False) -> None:
    """Sets the number of this process's CPU threads.

    num_cores: number of cores for this process. takes_one: whether the default is one thread, as with a GPU.

    With a GPU, the host only launches kernels and prepares batches; synchronising more threads would slow down every
    small operation. On the CPU, the default replaces torchrun's OMP_NUM_THREADS=1, which would leave cores idle.
    """
    shares_machine = is_under_torchrun() and os.environ.get("LOCAL_WORLD_SIZE") != "1"
    launcher_chose = shares_machine and os.environ.get("OMP_NUM_THREADS") == "1"
    user_chose = "OMP_NUM_THREADS" in os.environ and not launcher_chose
    takes_one |= device.type == "cuda"
    if requested is None and not user_chose and (takes_one or launcher_chose or num_cores < len(usable_cores())):
        requested = 1 if takes_one else num_cores
    if requested is not None:
        torch.set_num_threads(requested)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for reuse; returning it to the kernel would cause page faults in every step.

    Blocks over 32 MiB are still returned to the kernel. Call this function only in processes that do nothing but
    train, because the previous setting cannot be restored.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def usable_cores() -> Collection[int]:
    """Returns the indices of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def cores_per_rank(usable: Sequence[Collection[int]]) -> int:
    """Returns the number of cores, at least 1, for each rank on a machine, given the cores that each rank may use.

    Ranks share a core equally; SLURM's srun, unlike torchrun, often binds each rank to cores of its own.
    """
    num_ranks = Counter(chain.from_iterable(usable))
    return max(1, min(int(sum(Fraction(1, num_ranks[core]) for core in own)) for own in usable))


def half_precision(device: torch.device) -> str:
    """Returns the half-precision type that is fast on a device: "bf16", "fp16", or "off" for none.

    That is bf16 on GPUs of compute capability 8.0 or higher, and fp16 on older GPUs. A CPU without bf16 instructions is
    about ten times slower in bf16 than in float32.
    """
    if device.type != "cuda":
        return "off"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def numbers_at_once(device: torch.device) -> int:
    """Returns a chunk size in elements: small enough for a CPU's cache, or large enough to hide a GPU's latency."""
    return 2**15 if device.type == "cpu" else 2**20


def arithmetic_of(device: torch.device) -> str:
    """Returns a name for a device's arithmetic; devices with the same name compute bitwise equal results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()} and {torch.get_num_threads()} thread(s)"


def device_label(device: torch.device) -> str:
    """Returns a device's name for messages."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


# --- work queues of devices --------------------------------------------------------------------------------------


class DeviceQueue:
    """Work queue of a synchronous device (the CPU): work is complete as soon as it is submitted.

    lag: number of steps after which the host can read a step's results without waiting. pins_memory: whether copies
    from pinned host memory are asynchronous.
    """

    pins_memory = False

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag

    def mark(self) -> Callable[[], bool]:
        """Marks the current point of the queue; returns a function that tells whether the device has reached it."""
        return lambda: True

    def fetch(self, value: Tensor) -> Callable[[], Any]:
        """Starts a copy to the host; returns a function that waits for it and returns its `tolist()`."""
        return value.tolist

    def instant(self) -> Any:
        """Returns a timestamp of the current point of the queue, to pass to `seconds`."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the seconds between two results of `instant`; waits until the device has reached the later point."""
        return float(end - start)

    def drain(self, within_s: float) -> None:
        """Waits at most `within_s` seconds for the device to finish its work, since a collective may never complete."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which the work that this thread submits does not wait for earlier work."""
        yield


class CudaQueue(DeviceQueue):
    """Work queue of a GPU, observed with CUDA events."""

    pins_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(LAG_STEPS)
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # stream of the last event

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
        # Each thread has its own current device, by default the first GPU, which may belong to another job.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield

    def _event(self, enable_timing: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=enable_timing)
        self._stream = torch.cuda.current_stream(self._device)
        event.record(self._stream)
        return event


def queue_of(device: torch.device) -> DeviceQueue:
    """Returns a device's work queue."""
    if device.type == "cuda":
        return CudaQueue(device)
    return DeviceQueue(0 if device.type == "cpu" else LAG_STEPS)
