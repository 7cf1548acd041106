"""Which devices a command line names, and how a process uses the host."""

import ctypes
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.config import FlagGroup, flag

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
MOST_THREADS = 1024
"""Of a process: with far more, starting them fails without a word."""
MOST_PROCESSES = 1024
"""Of a machine."""
_LARGEST_MMAP_THRESHOLD = 2**25


@dataclass
class DeviceFlags(FlagGroup):
    """Devices"""

    device: str = flag("auto", "where to train: auto (a GPU if there is one), cpu, cuda or cuda:N")
    num_threads: int | None = flag(
        None, "CPU threads per process (default: all cores, shared evenly by this machine's ranks)", local=True,
        at_least=1, at_most=MOST_THREADS,
    )  # fmt: skip

    def problems(self) -> list[str]:
        known = re.fullmatch(r"auto|cpu|cuda(?::([0-9]{1,6}))?", self.device)
        if known is None:
            return [f"--device {self.device}: must be auto, cpu, cuda or cuda:N"]
        num_gpus = torch.cuda.device_count()
        if self.device.startswith("cuda") and int(known[1] or 0) >= num_gpus:
            return [f"--device {self.device}: {_visible_gpus(num_gpus)}; choose another or --device cpu"]
        return []


@dataclass
class MultiDeviceFlags(FlagGroup):
    """Several devices"""

    multi_gpu: Literal["dp", "ddp", "fsdp"] | None = flag(
        None, "dp: one process drives several GPUs (nn.DataParallel); ddp: one process per device (faster); fsdp: so "
        "too, each of which keeps a part of the model (for what does not fit)",
    )  # fmt: skip
    gpu_ids: tuple[int, ...] | None = flag(
        None, "which of the visible GPUs to use, as 0,1,2 (default: all)", metavar="ID", local=True
    )
    nproc: int | None = flag(
        None, "ddp, fsdp: without torchrun, start this many processes (default: one per GPU, or 1 on CPU)", at_least=1,
        at_most=MOST_PROCESSES,
    )  # fmt: skip
    backend: Literal["nccl", "gloo"] | None = flag(
        None, "carries gradients between processes (default: nccl on GPUs, gloo on CPU)"
    )
    dist_timeout_s: float = flag(
        600.0, "seconds after which a process that waits for another one gives up, and names it", above=0
    )
    lockstep_every: int = flag(
        500, "compare the weights of all processes to the bit after every so many optimizer steps, and before every "
        "save; 0 is off", metavar="STEPS", at_least=0,
    )  # fmt: skip
    sync_bn: bool = flag(False, "ddp on GPUs: batch norm over the whole micro-batch of all devices")
    find_unused_parameters: bool = flag(False, "ddp: allow parameters that take no part in some forwards")
    reshard: Literal["always", "never"] = flag(
        "always", "fsdp: free a block's parameters after its forward; never: keep them until its backward (faster, but "
        "only gradients and moments stay in parts)",
    )  # fmt: skip
    shard_size: int | None = flag(
        None, "fsdp: divide the model among so many processes, as those of one machine, and copy it across the others "
        "(default: among all)", at_least=1,
    )  # fmt: skip
    local_rank: int | None = flag(None, "set by torch.distributed.launch", hidden=True, local=True)

    def problems(self) -> list[str]:
        found = []
        num_gpus = torch.cuda.device_count()
        if self.multi_gpu is None:
            found.append("--multi-gpu: needs a value, dp, ddp or fsdp; to train on one device run main.py")
        if self.gpu_ids is not None:
            shown = f"--gpu-ids {','.join(map(str, self.gpu_ids))}"
            absent = [i for i in self.gpu_ids if not 0 <= i < num_gpus]
            if absent:
                found.append(f"{shown}: there is no GPU {', '.join(map(str, absent))}; {_visible_gpus(num_gpus)}")
            if len(set(self.gpu_ids)) < len(self.gpu_ids):
                found.append(f"{shown}: names a GPU twice")
        if self.nproc is not None and self.multi_gpu == "dp":
            found.append(f"--nproc {self.nproc}: is for --multi-gpu ddp and fsdp; dp is a single process")
        if self.find_unused_parameters and self.multi_gpu == "fsdp":
            found.append("--find-unused-parameters: is for --multi-gpu ddp; leave it out")
        if self.multi_gpu != "fsdp":
            sharding = {"--reshard": self.reshard != "always" and self.reshard, "--shard-size": self.shard_size}
            found += [f"{name} {value}: is for --multi-gpu fsdp" for name, value in sharding.items() if value]
        return found

    @property
    def has_processes(self) -> bool:
        """Whether each device has a process of its own."""
        return self.multi_gpu in ("ddp", "fsdp")


def _visible_gpus(count: int) -> str:
    return "this machine shows no GPU" if not count else f"the visible GPUs are 0 to {count - 1}"


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


def set_num_threads(requested: int | None, local_world_size: int) -> None:
    """CPU threads of this process.

    torchrun sets OMP_NUM_THREADS=1 for processes whose user said nothing, which would leave cores idle.
    """
    launcher_chose = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    user_chose = "OMP_NUM_THREADS" in os.environ and not launcher_chose
    if requested is None and local_world_size > 1 and not user_chose:
        requested = max(1, num_cores() // local_world_size)
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


def device_label(device: torch.device) -> str:
    """A device as the user knows it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"
