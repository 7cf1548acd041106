"""Checks this machine for training: GPUs, communication between processes, disk, data loading.

Starts processes as training does, and verifies and times an all-reduce between them. Then checks versions, GPUs, copies
between GPUs, the disk of --save-dir, shared memory, the limit on open files, and data-loading workers. Every line says
OK, warning (with advice) or BROKEN; the exit status is 0 if no line says BROKEN. Under torchrun each machine checks
itself, and all machines take part in the all-reduce.

examples:
  python profiler.py check
  python profiler.py check --save-dir /scratch/runs --nproc 4 --json check.json
  torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 --master_port=29500 profiler.py check
"""

import json
import platform
import socket
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from trainer.common import forms
from trainer.config import FlagGroup, flag
from trainer.failure.signals import STOP_SIGNALS
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.parallel.ddp import Replicated
from trainer.parallel.devices import usable_gpus
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.group import Group
from trainer.parallel.launch import num_processes
from trainer.parallel.process_group import ProcessGroup
from trainer.parallel.strategy import Strategy
from trainer.profiling.machine import Finding, of_this_machine
from trainer.profiling.meters import LARGE_BYTES, small_and_large_sum_s
from trainer.profiling.processes import PROCESSES_ON_CPU, exit_status, in_use, run_job
from trainer.profiling.report import save_results

EXIT_BROKEN = 1


@dataclass
class CheckFlags(FlagGroup):
    """Checking this machine"""

    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "device to check; auto: all GPUs, or the CPU if there is none"
    )
    save_dir: Path = flag(Path("checkpoints"), "folder for runs; the command tests the disk that holds it")
    nproc: int | None = flag(
        None, "number of processes to start if torchrun is not used (default: one per GPU, 2 on the CPU)", at_least=1
    )
    gpu_ids: tuple[int, ...] | None = flag(None, "visible GPUs to use, such as 0,1,2 (default: all)", metavar="ID")
    backend: Literal["nccl", "gloo"] | None = flag(
        None, "communication backend to test (default: nccl on GPUs, gloo on the CPU)"
    )
    dist_timeout_s: float = flag(
        60.0, "seconds to wait for another process before stopping with an error", metavar="SECONDS", above=0
    )
    json: Path | None = flag(None, "also write the results to this file", metavar="FILE")

    def problems(self) -> list[str]:
        return [*DeviceFlags(self.device).problems(), *self.multi().problems()]

    def multi(self) -> MultiDeviceFlags:
        """Converts this command's flags to the multi-device flags of training."""
        return MultiDeviceFlags(forms.USUAL, self.gpu_ids, self.nproc, self.backend, self.dist_timeout_s)


def check(tool: CheckFlags, environment: RankEnvironment | None) -> int:
    """Runs the command `check`; returns the exit status. Raises OSError if results cannot be written.

    environment: rank environment of this process under torchrun; if None, this call starts the processes.
    """
    gpus = usable_gpus(tool.device, tool.gpu_ids)
    speaks_for_host = environment is None or environment.local_rank in (0, None)
    if speaks_for_host:
        print(f"{socket.gethostname()}, {platform.system()}, Python {platform.python_version()}", flush=True)
    # tests communication first, because machines may take different times for their own tests
    job = partial(_exchange, tool.multi(), DeviceFlags(tool.device))
    num_wanted = num_processes(tool.multi(), tool.device) if tool.nproc or gpus else PROCESSES_ON_CPU
    status, found = run_job(job, num_wanted, environment)
    if status - 128 in STOP_SIGNALS:
        return status
    if not speaks_for_host:
        # if this process failed, a launcher would kill the machine's first process, which still runs tests and reports
        return 0
    findings = [Finding(**found)] if found else []
    if status != 0 and (found or {}).get("level") != "BROKEN":
        advice = "see the message above; NCCL_DEBUG=INFO shows details, GLOO_SOCKET_IFNAME chooses a network interface"
        findings.append(Finding("BROKEN", "exchange", "the processes could not exchange data", advice))
        print(findings[-1], flush=True)
    for finding in of_this_machine(tool.save_dir, gpus):
        print(finding, flush=True)
        findings.append(finding)
    save_results(tool.json, {"host": socket.gethostname(), "findings": [asdict(finding) for finding in findings]})
    return EXIT_BROKEN if any(finding.level == "BROKEN" for finding in findings) else 0


def _exchange(multi: MultiDeviceFlags, devices: DeviceFlags, result: Path, environment: RankEnvironment) -> int:
    """Tests communication with other processes. Rank 0 prints the finding; each machine's first process stores it."""

    def work() -> int:
        strategy = Replicated(ProcessGroup(environment, multi, devices))
        with in_use(strategy.group):
            strategy.group.check_devices()
            finding = of_exchange(strategy)
            if strategy.group.is_main:
                print(finding, flush=True)
            if environment.local_rank in (0, None):
                result.write_text(json.dumps(asdict(finding)))
        return EXIT_BROKEN if finding.level == "BROKEN" else 0

    return exit_status(work)


def of_exchange(strategy: Strategy) -> Finding:
    """Verifies and times all-reduces over all processes, which must call this function together."""
    world_size, devices = strategy.group.world_size, strategy.describe()
    if not sums_are_right(strategy.group):
        advice = "training here would give wrong results; try NCCL_P2P_DISABLE=1 or --backend gloo"
        return Finding("BROKEN", "exchange", f"{devices}: sums are wrong", advice)
    if world_size == 1:
        return Finding("OK", "exchange", f"{devices}: there is one process, so nothing is exchanged")
    small_s, large_s = small_and_large_sum_s(strategy.group)
    bandwidth = 2 * (world_size - 1) / world_size * LARGE_BYTES / large_s / 1e9
    return Finding(
        "OK", "exchange", f"{devices}: sums are right; 4 B take {1e6 * small_s:.0f} us, 64 MiB "
        f"{1e3 * large_s:.1f} ms ({bandwidth:.2f} GB/s per process)",
    )  # fmt: skip


def sums_are_right(group: Group) -> bool:
    """Returns whether an all-reduce of known numbers is exact on every process. All processes must call it together."""
    rank, world_size = group.rank, group.world_size
    numbers = torch.arange(10_000, dtype=torch.float32, device=group.device)
    expected = world_size * numbers + world_size * (world_size - 1) / 2
    values = numbers + rank
    group.start_all_reduce(values)()
    wrong = torch.tensor([float(not torch.equal(values, expected))], dtype=torch.float64)
    return float(group.sum(wrong)) == 0
