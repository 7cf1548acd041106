"""Measures samples per second of every model with `--compile`; runs last, because compiling is slow."""

from functools import partial

from benchmarks.on_gpu.models import MODELS
from benchmarks.on_gpu.part import Report, Setting
from benchmarks.on_gpu.throughput import PRECISIONS, of_model

PRECISION = "bf16"


def measure(setting: Setting, report: Report) -> None:
    if not setting.is_gpu:
        report.figure("left out", "on a GPU alone")
        return
    for name in MODELS:
        flags = [*PRECISIONS[PRECISION], "--compile"]
        work = partial(of_model, setting, report, name, f"{PRECISION}, compiled", flags)
        report.attempt(f"{name}, {PRECISION}, compiled", work)
