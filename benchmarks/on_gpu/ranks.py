"""Checks training in several processes as far as one GPU allows: one rank with NCCL, two ranks with gloo on one GPU.

In float64, weights must equal the weights of one process up to rounding; with `--parts`, they must be equal to the bit.
`--cuda-graphs on` must not change any bit. On the CPU only gloo is checked. With several GPUs, 2 to 8 ranks with NCCL
are compared, too, and their samples per second show how training scales.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.on_gpu.part import CACHE, HELPERS, ROOT, Ended, Report, Setting, difference, last, run, unlike
from benchmarks.on_gpu.profiled import profiled

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
PARTS = ["--dtype", "float32", "--parts", 4, "--dropout", 0.2]
GRAPHED = {name: ON_GPU[name] for name in ("gloo, two ranks", "nccl, one rank")}
"""Configurations of ranks that are compared with and without graphs on one GPU."""


def measure(setting: Setting, report: Report) -> None:
    for name, flags in (ON_GPU if setting.is_gpu else ON_CPU).items():
        report.attempt(name, partial(compare, setting, report, name, flags))
        if "ddp" in flags and "--sync-bn" not in flags:
            report.attempt(f"{name}, parts", partial(compare_in_parts, setting, report, name, flags))
    if setting.is_gpu:
        report.attempt("nccl, two ranks on one GPU", partial(expect_refusal, setting, report))
        sizes = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
        several = {f"nccl, {n} ranks": ["--multi-gpu", "ddp", "--nproc", n, "--backend", "nccl"] for n in sizes}
        for name, flags in (GRAPHED | several).items():
            report.attempt(f"{name}, graphs", partial(compare_graphs, setting, report, name, flags))
        for graphs in ("off", "on") if sizes else ():
            report.attempt(f"scaling, graphs {graphs}", partial(scale, setting, report, sizes, graphs))


def compare(setting: Setting, report: Report, name: str, flags: list[object]) -> None:
    alone = run(setting, f"{name}, one process", *FLAGS, *(NORMED if "--batch-norm" in flags else []))
    started = time.perf_counter()
    directory, _ = run_several(setting, name, *flags)
    report.figure(f"{name}, seconds", round(time.perf_counter() - started, 1))
    far = difference(last(directory)["model"], last(alone)["model"])
    report.check(f"{name}, difference of weights", far < LIMIT, far)


def compare_in_parts(setting: Setting, report: Report, name: str, flags: list[object]) -> None:
    alone = run(setting, f"{name}, parts, one process", *FLAGS, *PARTS)
    directory, _ = run_several(setting, f"{name}, parts", *flags, *PARTS)
    different = unlike(last(directory), last(alone))
    report.check(f"{name}, parts", not different, {"differs": different[:1]})


def compare_graphs(setting: Setting, report: Report, name: str, flags: list[object]) -> None:
    more = ["--dtype", "float32", "--deterministic", "--max-steps", 24, "--global-batch-size", 16]
    (eager, _), (graphed, said) = (
        run_several(setting, f"{name}, graphs {graphs}", *flags, *more, "--cuda-graphs", graphs)
        for graphs in ("off", "on")
    )
    different = unlike(last(graphed), last(eager))
    lines = [line for line in said.splitlines() if "CUDA graphs: " in line]
    report.check(f"{name}, graphs", not different and not lines, {"differs": different[:1], "lines": lines})


def scale(setting: Setting, report: Report, sizes: list[int], graphs: str) -> None:
    worlds = ["--world-sizes", ",".join(map(str, sizes)), "--rounds", 1, "--steps", setting.pick(60, 2)]
    more = ["--batch-size", 256, "--cuda-graphs", graphs, *setting.where]
    for world in profiled(setting, "scaling", *worlds, *more)["worlds"]:
        title = f"scaling, graphs {graphs}, {world['mode']} on {world['num_devices']}"
        report.figure(title, {name: world[name] for name in ("samples_per_second", "efficiency", "step_ms_mean")})


def expect_refusal(setting: Setting, report: Report) -> None:
    flags = ["--multi-gpu", "ddp", "--nproc", 2, "--backend", "nccl", "--gpu-ids", 0, "--dist-timeout-s", 60]
    _, message = run_several(setting, "nccl twice", *flags, status=2)
    report.check("nccl, two ranks on one GPU, refused", "error:" in message and "Traceback" not in message, message)


def run_several(setting: Setting, name: str, *flags: object, status: int = 0) -> tuple[Path, str]:
    """Runs a command line of main_multi_gpu.py; returns its run directory and the end of its output."""
    directory = setting.folder / name
    threads = ["--num-threads", 1] if setting.is_small else []
    argv = [
        sys.executable, "main_multi_gpu.py", "--device", setting.device, "--save-dir", directory,
        "--cache-dir", setting.folder.parent / CACHE, *threads, *FLAGS, *flags,
    ]  # fmt: skip
    print(*argv, flush=True)
    done = subprocess.run(list(map(str, argv)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    if done.returncode != status:
        raise Ended(f"ended with status {done.returncode}, not {status}: {done.stdout.strip()[-300:]}")
    return directory, done.stdout.strip()[-4000:]
