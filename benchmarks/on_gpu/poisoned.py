"""Checks in every precision that a step with a non-finite loss changes nothing, even if the host sees the loss late.

A run that skips a batch with a non-finite loss is compared with a run without the batch. The final weights must be
identical to the bit, except in fp16, where the gradient scales differ.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.part import ROOT, Ended, Report, Setting, difference, last, run
from trainer.loading.order import EpochOrder

NUM_TRAIN, SIZE, EPOCH, BATCH = 101, 12, 1, 4
TASK = f"{ROOT / 'benchmarks' / 'on_gpu' / 'gpu_tasks.py'}:LatePoisoned"
PRECISIONS = {
    "off": ["--amp", "off"],
    "bf16": ["--amp", "bf16"],
    "fp16": ["--amp", "fp16"],
    "float64": ["--dtype", "float64"],
}
FLAGS = [
    "--task", TASK, "--epochs", 3, "--num-train", NUM_TRAIN, "--batch-size", 4, "--global-batch-size", SIZE,
    "--ema-decay", 0.9, "--lr", 0.01, "--log-interval", 1000, "--num-workers", 0, "--deterministic",
    "--poisoned-epoch", EPOCH,
]  # fmt: skip
FP16_LIMIT = 0.05
SAMPLES = EpochOrder(0, EPOCH, 0, NUM_TRAIN).take(BATCH * SIZE, (BATCH + 1) * SIZE).tolist()


def measure(setting: Setting, report: Report) -> None:
    for precision in setting.pick(list(PRECISIONS), ["off", "bf16"]):
        for more in ((), ("--batch-norm",), ("--optimizer", "muon"))[: setting.pick(3, 1)]:
            name = " ".join([precision, *more[-1:]])
            report.attempt(name, partial(compare, setting, report, name, [*PRECISIONS[precision], *more]))
        report.attempt(f"{precision}, stop", partial(expect_stop, setting, report, precision))


def compare(setting: Setting, report: Report, name: str, flags: list[str]) -> None:
    everyone = ",".join(map(str, SAMPLES))
    expected = last(run(setting, f"{name} without", *FLAGS, *flags, "--poison", "absent", "--poisoned", everyone))
    for poison in setting.pick(("loss", "flat_loss", "gradient", "input"), ("gradient",)):
        met = ("--poison", poison, "--poisoned", SAMPLES[3], "--on-nonfinite", "skip")
        found = last(run(setting, f"{name} {poison}", *FLAGS, *flags, *met))
        far = difference(found["model"], expected["model"])
        limit = FP16_LIMIT if "fp16" in flags else 0.0
        report.check(f"{name}, {poison}, difference", far <= limit and all_finite(found["model"]), far)
        # fp16 first treats a non-finite step as an overflow, which a lower gradient scale may avoid.
        skipped = 0 if "fp16" in flags else 1
        report.check(f"{name}, {poison}, steps skipped", found["skipped_steps"] == skipped, found["skipped_steps"])
        if "fp16" in flags:
            halvings = math.log2(expected["scaler"]["scale"] / found["scaler"]["scale"])
            report.check(f"{name}, {poison}, halvings of the scale", halvings == 1, halvings)


def expect_stop(setting: Setting, report: Report, precision: str) -> None:
    """Checks that a run stops at the first non-finite step, and that all saved weights are finite."""
    met = ("--poison", "loss", "--poisoned", SAMPLES[3], "--on-nonfinite", "stop")
    name = f"{precision} stop"
    if precision == "fp16":  # fp16 stops only at its lowest gradient scale
        report.check(f"{precision}, goes on", bool(run(setting, name, *FLAGS, *PRECISIONS[precision], *met)))
        return
    try:
        directory = run(setting, name, *FLAGS, *PRECISIONS[precision], *met, status=2)
    except Ended as error:
        report.check(f"{precision}, stops", False, str(error))
        return
    report.check(f"{precision}, stops", all_finite(last(directory)["model"]))


def all_finite(weights: dict[str, Any]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values() if isinstance(value, Tensor))
