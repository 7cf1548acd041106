"""The most memory that was in use at once."""

from contextlib import suppress
from pathlib import Path

import torch

MIB = 2**20
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What Linux wants written to clear_refs; see proc(5)."""


def forget_peak(device: torch.device) -> None:
    """What is in use now becomes the peak, from which `peak_memory_mib` goes up."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_memory_mib(device: torch.device) -> float:
    """On a GPU what tensors occupied there at most; elsewhere all memory of this process, the libraries included.

    NaN where the system does not say, as off Linux.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    with suppress(OSError, StopIteration):
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return float("nan")
