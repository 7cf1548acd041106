"""Checks that a checkpoint saved while slow kernels are queued contains their results, and no later changes."""

import time

import torch

from benchmarks.on_gpu.gpu_tasks import keep_busy
from benchmarks.on_gpu.part import Report, Setting, checkpoint_of_step, difference, run
from benchmarks.on_gpu.poisoned import TASK
from trainer.checkpoint.background import snapshot, tensors_of

HALF_A_SECOND = 1_000_000_000
"""Approximate length of a slow kernel, in cycles of the GPU's clock."""
TIMES = 3


def measure(setting: Setting, report: Report) -> None:
    report.attempt("copies", lambda: copy_while_busy(setting, report))
    report.attempt("checkpoints", lambda: save_while_busy(setting, report))


def copy_while_busy(setting: Setting, report: Report) -> None:
    """Checks snapshots that reuse memory, while values change just before and just after each snapshot."""
    device = torch.device(setting.device)
    values = [torch.zeros(size, device=device) for size in (3, setting.pick(10_000_000, 1000))]
    state, copies = {"values": values, "again": values[0]}, None
    for count in range(1, TIMES + 1):
        keep_busy(device, HALF_A_SECOND)
        for value in values:
            value += 1
        started = time.perf_counter()
        copies = snapshot(state, reusable=copies)
        waited = time.perf_counter() - started
        for value in values:
            value += 1000
        setting.synchronise()
        right = all(bool((copy == count + 1000 * (count - 1)).all()) for copy in tensors_of(copies))
        report.check(f"copy {count} is of its moment", right)
        report.figure(f"copy {count}, seconds with the wait for the kernel", round(waited, 4))
        if setting.is_gpu:
            locked = all(copy.is_pinned() for copy in tensors_of(copies))
            report.check(f"copy {count} is in page-locked memory", locked)


def save_while_busy(setting: Setting, report: Report) -> None:
    """Compares the checkpoints that a run saves between its steps with runs that end at these steps."""
    flags = [
        "--task", TASK, "--max-steps", 12, "--batch-size", 8, "--deterministic", "--log-interval", 1000, "--schedule",
        "constant", "--warmup-steps", 0, "--keep-checkpoints", 0, "--num-train", 200, "--ema-decay", 0.9,
    ]  # fmt: skip
    saved = run(setting, "saved", *flags, "--save-every-steps", 4)
    for step in setting.pick((4, 8), (4,)):
        ended = run(setting, f"ended {step}", *flags, "--max-steps", step)
        found, expected = (
            torch.load(checkpoint_of_step(directory, step), weights_only=True) for directory in (saved, ended)
        )
        for part in ("model", "training_model"):
            far = difference(found[part], expected[part])
            report.check(f"checkpoint of step {step}, {part}, difference", far == 0, far)
