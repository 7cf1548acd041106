"""Checks this machine: versions, GPUs, disk, shared memory, data loading."""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainer.common.errors import reason
from trainer.loading.order import SampleKeys
from trainer.loading.workers import BatchLoader, Workers
from trainer.parallel.devices import usable_cores
from trainer.parallel.process_group import available_backends
from trainer.profiling.meters import MIB, Timer

GIB = 2**30
DISK_BYTES, COPY_BYTES = 64 * MIB, 256 * MIB
LEAST_DISK_MIB_S, LEAST_FREE_GIB, LEAST_SHARED_GIB, LEAST_OPEN_FILES = 20, 1, 1, 4096
NUM_BATCHES, BATCH_SIZE, SAMPLE_FLOATS = 200, 32, 1152


@dataclass(frozen=True)
class Finding:
    """Result of a check, printed as a line. advice: instruction for the user; "" if all is well."""

    level: Literal["OK", "warning", "BROKEN"]
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.subject}: {self.text}"
        return f"{line}; {self.advice}" if self.advice else line


class Broken(RuntimeError):
    """Raised by a test that fails; the message is printed for the user."""


Tested = tuple[str, str]
"""Result of a test as text, and a warning, which is "" if all is well."""


def tested(subject: str, advice: str, test: Callable[..., Tested], *args: Any) -> Finding:
    """Runs a test. advice: shown if the test raises RuntimeError (such as Broken) or OSError."""
    try:
        text, warning = test(*args)
    except (RuntimeError, OSError) as error:
        return Finding("BROKEN", subject, str(error) if isinstance(error, Broken) else reason(error), advice)
    return Finding("warning" if warning else "OK", subject, text, warning)


def of_this_machine(save_dir: Path, gpus: Sequence[int]) -> Iterator[Finding]:
    """Yields the findings of all checks except communication. gpus: indices of the GPUs to check; empty for the CPU."""
    yield tested("versions", "install a build of torch with gloo, which ddp needs", versions)
    for num_workers in (0, 2):  # workers are forked, which is impossible after CUDA is initialised
        advice = "train with --num-workers 0, or check shared memory"
        yield tested(f"loader, {num_workers} workers", advice, loader, num_workers)
    if not gpus and torch.version.cuda and not torch.cuda.is_available():
        advice = "torch is built for CUDA; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        yield Finding("warning", "GPU", "none is visible", advice)
    elif not gpus:
        yield Finding("OK", "GPU", "none: training runs on the CPU")
    for i in gpus:
        yield tested(f"GPU {i}", "exclude this GPU with --gpu-ids", gpu, i)
    for i, j in permutations(gpus, 2):
        yield tested(f"GPU {i} -> {j}", "set NCCL_P2P_DISABLE=1 to copy through the host", peer_to_peer, i, j)
    yield Finding("OK", "CPU", f"{len(usable_cores())} cores for this process")
    yield tested("disk", "choose another --save-dir", disk, save_dir)
    yield tested("shared memory", "train with --num-workers 0", shared_memory)
    yield tested("open files", "train with --num-workers 0", open_files)


def versions() -> Tested:
    """Reports the versions of torch and its communication backends."""
    found = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"]
    backends = available_backends()
    if "nccl" in backends:
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    if "gloo" not in backends:
        raise Broken(", ".join([*found, "no gloo"]))
    lacks_nccl = torch.cuda.is_available() and "nccl" not in backends
    return ", ".join([*found, "gloo"]), "without NCCL pass --backend gloo, which is slower" if lacks_nccl else ""


def gpu(i: int) -> Tested:
    """Reports the name, memory and compute capability of GPU i, and tests a matrix product."""
    properties = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    has_bf16 = (properties.major, properties.minor) >= (8, 0)
    text = (
        f"{properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, capability "
        f"{properties.major}.{properties.minor}, {'bf16' if has_bf16 else 'no bf16: fp16 under --amp auto'}"
    )
    ones = torch.ones(64, 64, device=f"cuda:{i}")
    if not (ones @ ones == 64).all():
        raise Broken(f"{text}; it multiplies matrices wrongly")
    return text, "another process uses its memory" if free < total / 2 else ""


def peer_to_peer(i: int, j: int) -> Tested:
    """Times and verifies a copy from GPU i to GPU j."""
    source = torch.ones(COPY_BYTES // 4, device=f"cuda:{i}")
    target = torch.zeros(COPY_BYTES // 4, device=f"cuda:{j}")
    timer = Timer(source.device, warm_up=1)  # the first copy sets up peer access
    for _ in range(2):
        with timer("copy"):
            target.copy_(source)
    text = f"{COPY_BYTES / timer.milliseconds('copy')[0] / 1e6:.1f} GB/s"
    if not (target == 1).all():
        raise Broken(f"{text}; the copy is wrong")
    if not torch.cuda.can_device_access_peer(i, j):
        return f"{text}, through the host", "these two GPUs have no direct access to each other"
    return text, ""


def disk(save_dir: Path) -> Tested:
    """Times writing and flushing a file in `save_dir` or its nearest existing parent folder."""
    folder = next(path for path in (save_dir.absolute(), *save_dir.absolute().parents) if path.is_dir())
    content = os.urandom(DISK_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            rate = DISK_BYTES / MIB / (time.perf_counter() - started)
    except OSError as error:
        raise Broken(f"{folder}: {error.strerror}") from None
    free = shutil.disk_usage(folder).free / GIB
    text = f"{folder}: {rate:.0f} MiB/s written and flushed, {free:.1f} GiB free"
    if rate < LEAST_DISK_MIB_S:
        return text, "saving is slow here; save less often, or to another disk"
    return text, "free some space before long runs" if free < LEAST_FREE_GIB else ""


def shared_memory(path: Path = Path("/dev/shm")) -> Tested:
    """Reports free shared memory, which DataLoader workers and NCCL use."""
    if not path.is_dir():
        return f"{path} does not exist on this system", ""
    free = shutil.disk_usage(path).free / GIB
    advice = "workers and NCCL may need more; use docker run --shm-size=8g, or --num-workers 0"
    return f"{free:.1f} GiB free in {path}", advice if free < LEAST_SHARED_GIB else ""


def open_files() -> Tested:
    """Reports the limit on open files; each prefetched batch of a worker needs an open file."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 0:
        return "no limit", ""
    return f"at most {soft}", "run ulimit -n 65536 if workers run out of files" if soft < LEAST_OPEN_FILES else ""


class _Numbers:
    def __len__(self) -> int:
        return BATCH_SIZE

    def __getitems__(self, keys: SampleKeys) -> np.ndarray:
        return np.repeat(keys.index[:, None].astype(np.float32), SAMPLE_FLOATS, axis=1)


def _as_batch(values: np.ndarray, keys: SampleKeys) -> dict[str, torch.Tensor]:
    return {"values": torch.from_numpy(values)}


def loader(num_workers: int) -> Tested:
    """Times and verifies batches of 144 KiB that this process or workers build."""
    batches = BatchLoader([_Numbers()], _as_batch, Workers(num_workers))
    keys = SampleKeys(np.arange(BATCH_SIZE), epoch=0)
    try:
        arriving = iter(batches([keys] * (NUM_BATCHES + 1)))
        next(arriving)
        started = time.perf_counter()
        is_right = all(batch["values"][-1, -1] == BATCH_SIZE - 1 for batch in arriving)
        rate = NUM_BATCHES / (time.perf_counter() - started)
    finally:
        batches.close()
    text = f"{rate:.0f} batches/s of {BATCH_SIZE * SAMPLE_FLOATS * 4 // 1024} KiB"
    if not is_right:
        raise Broken(f"{text}; their contents are wrong")
    return text, ""
