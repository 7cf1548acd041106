"""Several processes, as far as one GPU can show it: NCCL with one rank, gloo with two on the same GPU.

In float64 they learn what one process learns. On the CPU there is gloo alone.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.on_gpu.part import CACHE, HELPERS, ROOT, Ended, Report, Setting, difference, last, run

FLAGS = [
    "--task", f"{HELPERS / 'weighted_task.py'}:Weighted", "--dtype", "float64", "--max-steps", 6, "--num-train", 50,
    "--global-batch-size", 8, "--batch-size", 2, "--ema-decay", 0.9, "--log-interval", 2,
]  # fmt: skip
NORMED = ["--task", f"{HELPERS / 'poisoned_task.py'}:Poisoned", "--batch-norm"]
LIMIT = 1e-9
GLOO = ["--multi-gpu", "ddp", "--nproc", 2, "--backend", "gloo"]
ON_GPU = {
    "nccl, one rank": ["--multi-gpu", "ddp", "--nproc", 1, "--backend", "nccl"],
    "nccl, one rank, sync-bn": ["--multi-gpu", "ddp", "--nproc", 1, "--backend", "nccl", "--sync-bn", *NORMED],
    "nccl, one rank, fsdp": ["--multi-gpu", "fsdp", "--nproc", 1, "--backend", "nccl", *NORMED],
    "gloo, two ranks": [*GLOO, "--gpu-ids", 0],
    "dp, one GPU": ["--multi-gpu", "dp", "--gpu-ids", 0],
}
ON_CPU = {"gloo, two ranks": GLOO}


def measure(setting: Setting, report: Report) -> None:
    for name, flags in (ON_GPU if setting.is_gpu else ON_CPU).items():
        report.attempt(name, partial(compare, setting, report, name, flags))
    if setting.is_gpu:
        report.attempt("nccl, two ranks on one GPU", partial(expect_refusal, setting, report))


def compare(setting: Setting, report: Report, name: str, flags: list[object]) -> None:
    alone = run(setting, f"{name}, one process", *FLAGS, *(NORMED if "--batch-norm" in flags else []))
    started = time.perf_counter()
    directory, _ = run_several(setting, name, *flags)
    report.figure(f"{name}, seconds", round(time.perf_counter() - started, 1))
    far = difference(last(directory)["model"], last(alone)["model"])
    report.check(f"{name}, difference of weights", far < LIMIT, far)


def expect_refusal(setting: Setting, report: Report) -> None:
    flags = ["--multi-gpu", "ddp", "--nproc", 2, "--backend", "nccl", "--gpu-ids", 0, "--dist-timeout-s", 60]
    _, message = run_several(setting, "nccl twice", *flags, status=2)
    report.check("nccl, two ranks on one GPU, refused", "error:" in message and "Traceback" not in message, message)


def run_several(setting: Setting, name: str, *flags: object, status: int = 0) -> tuple[Path, str]:
    """Runs a command line of main_multi_gpu.py; its run directory, and what it said on standard error."""
    directory = setting.folder / name
    threads = ["--num-threads", 1] if setting.is_small else []
    argv = [
        sys.executable, "main_multi_gpu.py", "--device", setting.device, "--save-dir", directory,
        "--cache-dir", setting.folder.parent / CACHE, *threads, *FLAGS, *flags,
    ]  # fmt: skip
    print(*argv, flush=True)
    done = subprocess.run(list(map(str, argv)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    print(done.stderr, flush=True)
    if done.returncode != status:
        raise Ended(f"ended with status {done.returncode}, not {status}: {done.stderr.strip()[-300:]}")
    return directory, done.stderr.strip()[-1000:]
