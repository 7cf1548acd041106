"""Describes the machine: its GPU, and the versions of software that affects the results."""

import os
import platform
import subprocess

import torch

from benchmarks.on_gpu.part import ROOT, Report, Setting

MIB = 2**20


def measure(setting: Setting, report: Report) -> None:
    report.figure("python", platform.python_version())
    report.figure("torch", torch.__version__)
    report.figure("cores", len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    report.figure("commit", said_by("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"))
    if not setting.is_gpu:
        report.figure("device", platform.processor() or platform.machine())
        return
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here; --device cpu tries the parts without one")
    properties = torch.cuda.get_device_properties(0)
    report.figure("device", properties.name)
    report.figure("memory, MiB", properties.total_memory // MIB)
    report.figure("capability", f"{properties.major}.{properties.minor}")
    report.figure("gpus", torch.cuda.device_count())
    report.figure("cuda", torch.version.cuda)
    report.figure("cudnn", torch.backends.cudnn.version())
    report.figure("driver", said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"))
    if torch.distributed.is_nccl_available():
        report.figure("nccl", ".".join(map(str, torch.cuda.nccl.version())))


def said_by(*command: str) -> str | None:
    """Returns the output of a program; None if the program is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
