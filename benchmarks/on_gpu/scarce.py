"""Checks that a run that exhausts the GPU's memory continues with smaller micro-batches and ends with correct weights.

The memory limit is real: torch refuses to allocate more than a share of the GPU's memory. On the CPU, which has no such
limit, the errors are injected. Weights are compared in float64 with the weights of a run with enough memory.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks.on_gpu.part import HELPERS, ROOT, Report, Setting, difference, last, run

WEIGHTED = f"{HELPERS / 'weighted_task.py'}:Weighted"
TIGHT = f"{HELPERS / 'tight_task.py'}:Tight"
SHRINKING = f"{ROOT / 'benchmarks' / 'on_gpu' / 'gpu_tasks.py'}:Shrinking"
SHARE = 0.7
"""Share of an unlimited run's peak memory that suffices only for half of the run's micro-batch."""
LIMIT = 1e-9
FLAGS = ["--dtype", "float64", "--epochs", 2, "--log-interval", 1000]


def measure(setting: Setting, report: Report) -> None:
    for name, case in CASES.items():
        report.attempt(name, partial(case, setting, report, name))


def short_from_the_start(setting: Setting, report: Report, name: str) -> None:
    """Checks a run whose memory is too small from the start, which on a GPU the dry run detects."""
    flags = [*FLAGS, *sizes(setting)]
    expected, peak = with_room(setting, name, flags)
    real, injected = ["--task", WEIGHTED], ["--task", TIGHT, "--fit", 12]
    with limited(setting, SHARE * peak):
        directory = run(setting, f"{name}, short", *flags, *(real if setting.is_gpu else injected))
    compare(report, name, expected, directory, "batch_size")


def short_later(setting: Setting, report: Report, name: str) -> None:
    flags = [*FLAGS, *sizes(setting)]
    expected, peak = with_room(setting, name, flags)
    real = ["--task", SHRINKING, "--left", share_of_gpu(setting, SHARE * peak)]
    injected = ["--task", TIGHT, "--fit", 12, "--roomy-forwards", 2]
    with limited(setting):
        directory = run(setting, f"{name}, short", *flags, *(real if setting.is_gpu else injected))
    compare(report, name, expected, directory, "batch_size")


def no_room_at_all(setting: Setting, report: Report, name: str) -> None:
    """Checks the message and exit status of a run with enough memory for weights, but not for optimizer moments."""
    real, injected = ["--task", WEIGHTED, "--width", 4_000_000], ["--task", TIGHT, "--fit", 0]  # 352 MB
    with limited(setting, 800e6):
        run(setting, name, *FLAGS, "--batch-size", 2, *(real if setting.is_gpu else injected), status=2)
    report.check(name, True)


CASES = {
    "short from the start": short_from_the_start,
    "short later": short_later,
    "no room at all": no_room_at_all,
}


def sizes(setting: Setting) -> list[object]:
    """Returns flags for steps whose memory is mostly activations: about 2 GiB on a GPU, even with --small."""
    if setting.is_gpu:
        return ["--width", 2048, "--num-train", 8192, "--batch-size", 4096, "--num-val", 64]
    return ["--num-train", 32, "--batch-size", 16]


def with_room(setting: Setting, name: str, flags: list[object]) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the weights of a run without a memory limit, and the peak memory of its tensors in bytes."""
    if setting.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    weights = last(run(setting, f"{name}, with room", "--task", WEIGHTED, *flags))["model"]
    return weights, torch.cuda.max_memory_allocated() if setting.is_gpu else 0


@contextmanager
def limited(setting: Setting, num_bytes: float | None = None) -> Iterator[None]:
    """Context manager that limits torch's memory on the GPU. num_bytes: limit; None: the task sets a limit itself."""
    if not setting.is_gpu:
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    if num_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(share_of_gpu(setting, num_bytes))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def share_of_gpu(setting: Setting, num_bytes: float) -> float:
    if not setting.is_gpu:
        return 1.0
    return min(1.0, num_bytes / torch.cuda.get_device_properties(0).total_memory)


def compare(report: Report, name: str, expected: dict[str, torch.Tensor], directory: Path, limit: str) -> None:
    memory = directory / "memory.json"
    found = json.loads(memory.read_text()) if memory.exists() else {}
    report.check(f"{name}, samples per forward", found.get(limit) is not None, found.get(limit))
    far = difference(last(directory)["model"], expected)
    report.check(f"{name}, difference of weights", far < LIMIT, far)
