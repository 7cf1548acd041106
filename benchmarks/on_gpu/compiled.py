"""Measures samples per second of every model with `--compile`; runs last, because compiling is slow."""

from dataclasses import fields
from functools import partial

from benchmarks.on_gpu.models import MODELS
from benchmarks.on_gpu.part import Report, Setting
from benchmarks.on_gpu.throughput import PRECISIONS, of_model
from trainer.flags import TRAINER_GROUPS

FLAG = "compile"
PRECISION = "bf16"


def measure(setting: Setting, report: Report) -> None:
    has_flag = any(field.name == FLAG for group in TRAINER_GROUPS for field in fields(group))
    if not has_flag or not setting.is_gpu:
        report.figure("left out", f"there is no --{FLAG}" if not has_flag else "on a GPU alone")
        return
    for name in MODELS:
        flags = [*PRECISIONS[PRECISION], f"--{FLAG}"]
        work = partial(of_model, setting, report, name, f"{PRECISION}, compiled", flags)
        report.attempt(f"{name}, {PRECISION}, compiled", work)
