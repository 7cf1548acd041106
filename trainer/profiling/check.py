"""`profiler.py check`: is this machine ready to train, and how fast are its parts?"""

import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from trainer.loading.batches import BatchLoader
from trainer.loading.order import SampleKeys
from trainer.parallel.base import Parallel
from trainer.parallel.ddp import Distributed, available_backends
from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags, num_cores
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.errors import Failure
from trainer.parallel.launch import launch, num_processes
from trainer.parallel.signals import STOP_SIGNALS
from trainer.profiling.exchange import LARGE_BYTES, large_sum_s, latency_s, sums_are_right
from trainer.profiling.flags import CheckFlags
from trainer.profiling.processes import exit_status
from trainer.profiling.report import write_json

ABOUT = (
    """Is this machine ready? Starts processes as training would, and verifies and times an all-reduce between them;
then looks at GPUs, versions, what processes can talk through, peer-to-peer copies between GPUs, the disk of --save-dir,
data-loading workers, shared memory and limits. Every line says OK, warning (with advice) or BROKEN; the exit status
is 0 unless something is broken. Under torchrun each machine checks itself, and all of them exchange data.""",
    """examples:
  python profiler.py check
  python profiler.py check --save-dir /scratch/runs --nproc 4 --json check.json
  torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 --master_port=29500 profiler.py check""",
)

EXIT_BROKEN = 1
PROCESSES_ON_CPU = 2
"""Unless told, so that there is something to exchange."""
DISK_BYTES = 64 * 2**20
COPY_BYTES = 256 * 2**20
LEAST_DISK_MIB_S, LEAST_FREE_GIB = 20, 1
LEAST_SHARED_GIB = 1
LEAST_OPEN_FILES = 4096
NUM_BATCHES, BATCH_SIZE, SAMPLE_FLOATS = 200, 32, 1152


@dataclass(frozen=True)
class Finding:
    """One line. advice: what to do about it, unless all is well."""

    level: Literal["OK", "warning", "BROKEN"]
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.subject}: {self.text}"
        return f"{line}; {self.advice}" if self.advice else line


def check(tool: CheckFlags, environment: RankEnvironment | None) -> int:
    """One command line; returns the exit status.

    environment: who this process is among those that torchrun started; None starts them here.
    """
    speaks_for_host = environment is None or environment.local_rank in (0, None)
    if speaks_for_host:
        print(f"{socket.gethostname()}, {platform.system()}, Python {platform.python_version()}", flush=True)
    # First, while all processes are at the same place: how long a machine's own tests take is not the network's fault.
    status, findings = exchange(tool, environment)
    if status - 128 in STOP_SIGNALS:
        return status
    if not speaks_for_host:
        # Its host tells, and a launcher that sees a failure here would end that process in the middle of its tests.
        return 0
    if status != 0 and not is_broken(findings):
        advice = "see the message above; NCCL_DEBUG=INFO tells more about GPUs, GLOO_SOCKET_IFNAME chooses a network"
        findings += told([Finding("BROKEN", "exchange", "the processes could not exchange data", advice)])
    findings += told(of_this_machine(tool))
    if tool.json is not None:
        result = {"host": socket.gethostname(), "findings": [asdict(finding) for finding in findings]}
        status_of_file = exit_status(lambda: write_json(tool.json, result))
        if status_of_file != 0:
            return status_of_file
    return EXIT_BROKEN if is_broken(findings) else 0


def is_broken(findings: Iterable[Finding]) -> bool:
    """Whether a part is."""
    return any(finding.level == "BROKEN" for finding in findings)


def exchange(tool: CheckFlags, environment: RankEnvironment | None) -> tuple[int, list[Finding]]:
    """Exchanges data with the other processes; returns the exit status of that, and what this host's found."""
    on_cpu = tool.device == "cpu" or not torch.cuda.is_available()
    multi = MultiDeviceFlags(
        "ddp", gpu_ids=tool.gpu_ids, nproc=tool.nproc or (PROCESSES_ON_CPU if on_cpu else None), backend=tool.backend,
        dist_timeout_s=tool.dist_timeout_s, hang_timeout_s=tool.dist_timeout_s,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        path = Path(folder) / "exchange.json"
        job = partial(_exchange, multi, DeviceFlags(tool.device), path)
        status = launch(job, num_processes(multi, tool.device)) if environment is None else job(environment)
        return status, [Finding(**values) for values in json.loads(path.read_text())] if path.exists() else []


def told(findings: Iterable[Finding]) -> list[Finding]:
    """Prints each as soon as it is there."""
    kept = []
    for finding in findings:
        print(finding, flush=True)
        kept.append(finding)
    return kept


# --- this machine ------------------------------------------------------------------------------------------------


def of_this_machine(tool: CheckFlags) -> Iterator[Finding]:
    """What can be told without other processes."""
    gpus = [] if tool.device == "cpu" else list(tool.gpu_ids or range(torch.cuda.device_count()))
    yield versions()
    yield from of_gpus(gpus)
    yield from peer_to_peer(gpus)
    yield Finding("OK", "CPU", f"{num_cores()} cores for this process")
    yield disk(tool.save_dir)
    yield shared_memory()
    yield open_files()
    yield from loader()


def versions() -> Finding:
    """torch and what it can talk through."""
    found = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"]
    backends = available_backends()
    if "nccl" in backends:
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    found.append("gloo" if "gloo" in backends else "no gloo")
    if "gloo" not in backends:
        return Finding("BROKEN", "versions", ", ".join(found), "install a build of torch with gloo: ddp needs it")
    if torch.cuda.is_available() and "nccl" not in backends:
        return Finding("warning", "versions", ", ".join(found), "without NCCL give --backend gloo, which is slower")
    return Finding("OK", "versions", ", ".join(found))


def of_gpus(gpus: Sequence[int]) -> Iterator[Finding]:
    """Each GPU's name, memory, capability, and whether it computes."""
    if not gpus:
        if torch.version.cuda and not torch.cuda.is_available():
            advice = "this torch is built for CUDA: is there a driver (nvidia-smi), and what is CUDA_VISIBLE_DEVICES?"
            yield Finding("warning", "GPU", "none is visible", advice)
        else:
            yield Finding("OK", "GPU", "none: training runs on the CPU")
    for i in gpus:
        name = f"GPU {i}"
        try:
            properties = torch.cuda.get_device_properties(i)
            free, total = torch.cuda.mem_get_info(i)
            ones = torch.ones(64, 64, device=f"cuda:{i}")
            is_right = bool((ones @ ones == 64).all())
        except RuntimeError as error:
            yield Finding("BROKEN", name, str(error).splitlines()[0], "leave it out with --gpu-ids")
            continue
        has_bf16 = (properties.major, properties.minor) >= (8, 0)
        text = (
            f"{properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, capability "
            f"{properties.major}.{properties.minor}, {'bf16' if has_bf16 else 'no bf16: fp16 under --amp auto'}"
        )
        if not is_right:
            yield Finding("BROKEN", name, f"{text}; multiplies matrices wrongly", "leave it out with --gpu-ids")
        elif free < total / 2:
            yield Finding("warning", name, text, "somebody else uses its memory")
        else:
            yield Finding("OK", name, text)


def peer_to_peer(gpus: Sequence[int]) -> Iterator[Finding]:
    """Copies between every two GPUs, one way."""
    for i in gpus:
        for j in gpus:
            if i == j:
                continue
            name = f"GPU {i} -> {j}"
            try:
                rate, is_right = _copy(i, j)
            except RuntimeError as error:
                yield Finding("BROKEN", name, str(error).splitlines()[0], "NCCL_P2P_DISABLE=1 goes through the host")
                continue
            text = f"{rate:.1f} GB/s"
            if not is_right:
                yield Finding("BROKEN", name, f"{text}; the copy is wrong", "NCCL_P2P_DISABLE=1 goes through the host")
            elif not torch.cuda.can_device_access_peer(i, j):
                yield Finding("warning", name, f"{text}, by way of the host", "no direct access between these two")
            else:
                yield Finding("OK", name, text)


def _copy(i: int, j: int) -> tuple[float, bool]:
    """10^9 bytes per second from one GPU to the other, and whether what arrives is right."""
    source = torch.ones(COPY_BYTES // 4, device=f"cuda:{i}")
    target = torch.zeros(COPY_BYTES // 4, device=f"cuda:{j}")
    seconds = 0.0
    for _ in range(2):  # the first one opens the way
        torch.cuda.synchronize(i)
        torch.cuda.synchronize(j)
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(i)
        torch.cuda.synchronize(j)
        seconds = time.perf_counter() - started
    return COPY_BYTES / seconds / 1e9, bool((target == 1).all())


def disk(save_dir: Path) -> Finding:
    """Writes and flushes a file where checkpoints would go, or in the nearest folder that exists."""
    folder = next(path for path in (save_dir.absolute(), *save_dir.absolute().parents) if path.is_dir())
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.perf_counter()
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("BROKEN", "disk", f"{folder}: {error.strerror}", "choose another --save-dir")
    rate = DISK_BYTES / seconds / 2**20
    text = f"{folder}: {rate:.0f} MiB/s written and flushed, {free / 2**30:.1f} GiB free"
    if rate < LEAST_DISK_MIB_S:
        return Finding("warning", "disk", text, "checkpoints take long here; save less often, or elsewhere")
    if free < LEAST_FREE_GIB * 2**30:
        return Finding("warning", "disk", text, "free some space before long runs")
    return Finding("OK", "disk", text)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """What data-loading workers hand batches over through, and NCCL within a machine."""
    if not path.is_dir():
        return Finding("OK", "shared memory", f"{path} does not exist on this system")
    free = shutil.disk_usage(path).free / 2**30
    text = f"{free:.1f} GiB free in {path}"
    if free < LEAST_SHARED_GIB:
        advice = "workers and NCCL may run out of it; docker run --shm-size=8g, or --num-workers 0"
        return Finding("warning", "shared memory", text, advice)
    return Finding("OK", "shared memory", text)


def open_files() -> Finding:
    """Every batch that a worker hands over is an open file for a while."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_OPEN_FILES:
        return Finding("warning", "open files", f"at most {soft}", "ulimit -n 65536, if workers fail for it")
    return Finding("OK", "open files", f"at most {soft}" if soft >= 0 else "no limit")


class _Numbers:
    """Samples to load: as many numbers each as a window of nine signals."""

    def __len__(self) -> int:
        return BATCH_SIZE

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        return {"values": np.repeat(keys.index[:, None].astype(np.float32), SAMPLE_FLOATS, axis=1)}


def _as_tensors(samples: dict[str, np.ndarray], keys: SampleKeys) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in samples.items()}


def loader() -> Iterator[Finding]:
    """Batches of 144 KiB from this process and from two workers."""
    for num_workers in (0, 2):
        name = f"loader, {num_workers} workers"
        batches = BatchLoader(_Numbers(), _as_tensors, num_workers)
        keys = SampleKeys(np.arange(BATCH_SIZE), epoch=0)
        try:
            arriving = iter(batches([keys] * (NUM_BATCHES + 1)))
            next(arriving)
            started = time.perf_counter()
            is_right = all(batch["values"][-1, -1] == BATCH_SIZE - 1 for batch in arriving)
            rate = NUM_BATCHES / (time.perf_counter() - started)
        except (RuntimeError, OSError) as error:
            text = str(error).splitlines()[-1]
            yield Finding("BROKEN", name, text, "train with --num-workers 0; is there shared memory?")
            continue
        finally:
            batches.close()
        text = f"{rate:.0f} batches/s of {BATCH_SIZE * SAMPLE_FLOATS * 4 // 1024} KiB"
        yield Finding("OK", name, text) if is_right else Finding("BROKEN", name, f"{text}; contents are wrong")


# --- exchange ----------------------------------------------------------------------------------------------------


def _exchange(multi: MultiDeviceFlags, devices: DeviceFlags, result: Path, environment: RankEnvironment) -> int:
    """One process of those that exchange data; the main one tells, and each host's first leaves its findings in a file.

    Whoever fails says why: which one of them can is not known.
    """
    parallel: Parallel | None = None

    def work() -> None:
        nonlocal parallel
        parallel = Distributed(environment, multi, devices)
        parallel.diagnosis.has_checkpoints = False
        with parallel.diagnosis.explaining():
            findings = list(of_exchange(parallel))
            if parallel.is_main:
                told(findings)
            if environment.local_rank in (0, None):
                result.write_text(json.dumps([asdict(finding) for finding in findings]))
            if is_broken(findings):
                raise Failure("the exchange is broken")

    try:
        return exit_status(work)
    finally:
        if parallel is not None:
            parallel.close()


def of_exchange(parallel: Parallel) -> Iterator[Finding]:
    """Verifies and times sums over all processes. All processes call it."""
    world_size = parallel.shard[1]
    if not sums_are_right(parallel):
        advice = "no training here can be right; NCCL_P2P_DISABLE=1 may help, or --backend gloo"
        yield Finding("BROKEN", "exchange", f"{parallel.describe()}: sums come out wrong", advice)
    elif world_size == 1:
        yield Finding("OK", "exchange", f"{parallel.describe()}: one process, nothing to exchange")
    else:
        small, large = latency_s(parallel), large_sum_s(parallel)
        bandwidth = 2 * (world_size - 1) / world_size * LARGE_BYTES / large / 1e9
        yield Finding(
            "OK", "exchange", f"{parallel.describe()}: sums are right; 4 B take {1e6 * small:.0f} us, 64 MiB "
            f"{1e3 * large:.1f} ms ({bandwidth:.2f} GB/s per process)",
        )  # fmt: skip
