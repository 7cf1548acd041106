"""Measures device time, memory and collectives."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from trainer.parallel.devices import queue_of
from trainer.parallel.group import Group

MIB = 2**20
LARGE_BYTES = 64 * MIB
WARM_UP = 3


def spread(name: str, values_ms: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Returns the median and percentiles of durations: `{name}ms_median`, `{name}ms_p10`, `{name}ms_p90`."""
    p10, p50, p90 = np.quantile(values_ms, [0.1, 0.5, 0.9]).tolist()
    return {f"{name}ms_median": p50, f"{name}ms_p10": p10, f"{name}ms_p90": p90}


class Timer:
    """Collects durations by name: `with timer("forward"): ...`. warm_up: initial durations to drop for each name."""

    def __init__(self, device: torch.device, warm_up: int = 0) -> None:
        self._queue, self._warm_up = queue_of(device), warm_up
        self._spans: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._queue.instant()
        yield
        self._spans[name].append((start, self._queue.instant()))

    def milliseconds(self, name: str) -> list[float]:
        return [1e3 * self._queue.seconds(*span) for span in self._spans[name][self._warm_up :]]

    def results(self) -> dict[str, dict[str, float]]:
        """Returns `ms_median`, `ms_p10`, `ms_p90`, `ms_total` and `count` for each name."""
        durations = {name: self.milliseconds(name) for name in self._spans}
        return {name: {**spread("", ms), "ms_total": sum(ms), "count": len(ms)} for name, ms in durations.items()}


def forget_peak(*devices: torch.device) -> None:
    """Makes `peak_memory_mib` return the peak since this call."""
    gpus = [device for device in devices if device.type == "cuda"]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    if gpus:
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def peak_memory_mib(*devices: torch.device) -> float:
    """Returns the peak tensor memory in MiB of the fullest GPU; without a GPU, the peak memory of this process.

    Returns NaN if the system does not report this memory, for example on macOS.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        return max(map(torch.cuda.max_memory_allocated, gpus)) / MIB
    with suppress(OSError, StopIteration):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return float("nan")


def small_and_large_sum_s(group: Group) -> list[float]:
    """Returns the median seconds of an all-reduce of 4 bytes, and of 64 MiB. All processes must call it together."""
    found = []
    for num_bytes, repeats in ((4, 100), (LARGE_BYTES, 5)):
        values = torch.zeros(num_bytes // 4, device=group.device)
        timer = Timer(group.device, WARM_UP)
        for _ in range(WARM_UP + repeats):
            with timer("sum"):
                group.start_all_reduce(values)()
        found.append(median(timer.milliseconds("sum")) / 1e3)
    return found
