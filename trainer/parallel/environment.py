"""Which devices a command line names, and which rank the environment gives this process."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trainer.config import FlagGroup, flag


@dataclass
class DeviceFlags(FlagGroup):
    """Devices"""

    device: str = flag("auto", "where to train: auto (a GPU if there is one), cpu, cuda or cuda:N")
    num_threads: int | None = flag(
        None, "CPU threads per process (default: all cores, shared evenly by this machine's ranks)", at_least=1
    )

    def problems(self) -> list[str]:
        kind, _, index = self.device.partition(":")
        num_gpus = torch.cuda.device_count()
        if self.device == "auto" or self.device == "cpu":
            return []
        if kind != "cuda" or (index and not index.isdigit()) or self.device.endswith(":"):
            return [f"--device {self.device}: must be auto, cpu, cuda or cuda:N"]
        if int(index or 0) >= num_gpus:
            return [f"--device {self.device}: {_visible_gpus(num_gpus)}; choose another or --device cpu"]
        return []


@dataclass
class MultiDeviceFlags(FlagGroup):
    """Several devices"""

    multi_gpu: Literal["dp", "ddp"] | None = flag(
        None, "dp: one process drives several GPUs (nn.DataParallel); ddp: one process per device (faster)"
    )
    gpu_ids: tuple[int, ...] | None = flag(
        None, "which of the visible GPUs to use, as 0,1,2 (default: all)", metavar="ID"
    )
    nproc: int | None = flag(
        None, "ddp without torchrun: start this many processes (default: one per GPU, or 1 on CPU)", at_least=1
    )
    backend: Literal["nccl", "gloo"] | None = flag(
        None, "carries gradients between processes (default: nccl on GPUs, gloo on CPU)"
    )
    dist_timeout_s: float = flag(
        600.0, "seconds after which a process that waits for another one gives up: at the start, and for what only the "
        "main process does", above=0,
    )  # fmt: skip
    hang_timeout_s: float = flag(120.0, "the same within training and evaluation, once the first step is done", above=0)
    sync_bn: bool = flag(False, "ddp on GPUs: batch norm over the whole micro-batch of all devices")
    find_unused_parameters: bool = flag(False, "ddp: allow parameters that take no part in some forwards")
    local_rank: int | None = flag(None, "set by torch.distributed.launch", hidden=True)

    def problems(self) -> list[str]:
        found = []
        num_gpus = torch.cuda.device_count()
        if self.multi_gpu is None:
            found.append("--multi-gpu: needs a value, dp or ddp; to train on one device run main.py")
        if self.gpu_ids is not None:
            shown = f"--gpu-ids {','.join(map(str, self.gpu_ids))}"
            absent = [i for i in self.gpu_ids if not 0 <= i < num_gpus]
            if absent:
                found.append(f"{shown}: there is no GPU {', '.join(map(str, absent))}; {_visible_gpus(num_gpus)}")
            if len(set(self.gpu_ids)) < len(self.gpu_ids):
                found.append(f"{shown}: names a GPU twice")
        if self.nproc is not None and self.multi_gpu == "dp":
            found.append(f"--nproc {self.nproc}: is for --multi-gpu ddp; dp is a single process")
        if self.backend == "nccl" and not num_gpus:
            found.append("--backend nccl: needs a GPU and a CUDA build of torch; use --backend gloo")
        if self.sync_bn and (self.multi_gpu != "ddp" or not num_gpus):
            found.append("--sync-bn: needs --multi-gpu ddp on GPUs; torch has it for nothing else")
        return found


def _visible_gpus(count: int) -> str:
    return "this machine shows no GPU" if not count else f"the visible GPUs are 0 to {count - 1}"


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is among several.

    local_rank, local_world_size: among the processes of this machine; None where the launcher did not say.
    init_method: where the processes meet; "env://" or a file. attempt: how often the same launcher has started all of
    them again, with the addresses of the attempt before left where they meet.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    init_method: str = "env://"
    attempt: int = 0

    @property
    def meeting_place(self) -> str:
        """Where the processes meet, as a message names it."""
        if self.init_method != "env://":
            return self.init_method
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def read_rank_environment(
    environ: Mapping[str, str], flags: MultiDeviceFlags
) -> tuple[RankEnvironment | None, list[str]]:
    """The rank variables that torchrun, torch.distributed.launch or a hand-written script sets.

    Returns None if there are none, and one sentence for each contradiction.
    """
    local_rank_flag = flags.local_rank
    if flags.multi_gpu == "dp":
        return None, one_process_problems(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not any(name in environ for name in (*names[:2], "LOCAL_RANK")):
        if local_rank_flag is not None:
            return None, [f"--local-rank {local_rank_flag}: RANK and WORLD_SIZE are not set; use torchrun"]
        return None, []
    problems = [
        f"{name} is not set but {_set_names(environ)} is; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not environ.get(name)
    ]
    numbers: dict[str, int] = {}
    for name in (*names, "MASTER_PORT"):
        text = environ.get(name)
        if text:
            if text.isdigit():
                numbers[name] = int(text)
            else:
                problems.append(f"{name}={text}: must be a whole number, 0 or more")
    if local_rank_flag is not None and numbers.setdefault("LOCAL_RANK", local_rank_flag) != local_rank_flag:
        problems.append(f"--local-rank {local_rank_flag} contradicts LOCAL_RANK={numbers['LOCAL_RANK']}")
    for small, large in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "WORLD_SIZE"),
    ):
        if small in numbers and large in numbers and numbers[small] >= numbers[large]:
            problems.append(f"{small}={numbers[small]} must be below {large}={numbers[large]}")
    if numbers.get("LOCAL_WORLD_SIZE", 0) > numbers.get("WORLD_SIZE", 1 << 30):
        problems.append(
            f"LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']} must not exceed WORLD_SIZE={numbers['WORLD_SIZE']}"
        )
    if not 0 < numbers.get("MASTER_PORT", 1) < 65536:
        problems.append(f"MASTER_PORT={numbers['MASTER_PORT']}: must be between 1 and 65535")
    if flags.nproc is not None:
        problems.append(f"--nproc {flags.nproc}: RANK and WORLD_SIZE are set already, by a launcher; leave it out")
    if problems:
        return None, problems
    # Several torchrun agents meet at a new store each time, and do not count their restarts alike.
    is_one_agent = numbers.get("LOCAL_WORLD_SIZE") == numbers["WORLD_SIZE"]
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if is_one_agent else 0
    return RankEnvironment(
        numbers["RANK"], numbers["WORLD_SIZE"], numbers.get("LOCAL_RANK"), numbers.get("LOCAL_WORLD_SIZE"),
        attempt=attempt,
    ), []  # fmt: skip


def torchrun_agent() -> str | None:
    """Names the torchrun agent that started this process, like no other one; None without torchrun, or off Linux.

    Its run id would not do: it is "none" unless somebody chose one, and may be used again.
    """
    agent = os.getppid()
    try:
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]  # in clock ticks since boot
    except OSError:
        return None
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return f"process {agent} on {socket.gethostname()} since {started}" if is_under_torchrun else None


def one_process_problems(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with starting a run of one process several times over."""
    if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
        return [
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, so a launcher started several processes, but this run is "
            "a single one; use main_multi_gpu.py --multi-gpu ddp, or start it without the launcher"
        ]
    return []


def _set_names(environ: Mapping[str, str]) -> str:
    return ", ".join(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ)


def pick_device(name: str) -> torch.device:
    """`--device` -> a device with its index."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    _, _, index = name.partition(":")
    return torch.device("cuda", int(index or 0))


def set_num_threads(requested: int | None, local_world_size: int) -> int:
    """CPU threads of this process; returns the number.

    torchrun sets OMP_NUM_THREADS=1 for processes whose user said nothing, which would leave cores idle.
    """
    launcher_chose = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    user_chose = "OMP_NUM_THREADS" in os.environ and not launcher_chose
    if requested is None and local_world_size > 1 and not user_chose:
        requested = max(1, num_cores() // local_world_size)
    if requested is not None:
        torch.set_num_threads(requested)
    return torch.get_num_threads()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
