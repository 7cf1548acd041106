"""Samples per second of every model that comes with the trainer: in float32, bf16 and fp16.

The trainer's own loop trains them as `profiler.py step` would. What of a step is spent waiting for data, and the most
memory that tensors occupied, is told beside it.
"""

from functools import partial

import torch

from benchmarks.on_gpu.models import BATCH_SIZES, MODELS, chosen
from benchmarks.on_gpu.part import CACHE, Report, Setting
from trainer.api import process_restored
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.parallel.devices import pick_device
from trainer.parallel.strategy import SingleDevice
from trainer.profiling.measure import MeasuredRun, opened
from trainer.profiling.phase_clock import DATA

PRECISIONS = {"off": ["--amp", "off"], "bf16": ["--amp", "bf16"], "fp16": ["--amp", "fp16"]}


def measure(setting: Setting, report: Report) -> None:
    """Precision by precision, so that a part that is cut short has all models in some of them."""
    for kind, flags in PRECISIONS.items():
        for name in chosen(setting, on_cpu="bprmf"):
            report.attempt(f"{name}, {kind}", partial(of_model, setting, report, name, kind, flags))


def of_model(setting: Setting, report: Report, name: str, kind: str, more: list[str]) -> None:
    batch_size = setting.pick(BATCH_SIZES[MODELS[name][1]], 4)
    argv = [*MODELS[name], "--batch-size", str(batch_size), "--device", setting.device, *setting.threads, *more,
            "--cache-dir", str(setting.folder.parent / CACHE), "--log-interval", "1000"]  # fmt: skip
    flags, problems = parse(argv, several_devices=False)
    refuse(problems)
    if setting.is_gpu:
        torch.cuda.empty_cache()
    with process_restored(), opened(flags, argv, SingleDevice(pick_device(setting.device)), quiet=True) as run:
        found = MeasuredRun(run).measure(*setting.pick((30, 10), (2, 1)))
        cut_to = run.memory.limit.batch_size
    data = found["phases"][DATA]
    report.figure(f"{name}, {kind}", {
        "batch size": cut_to or batch_size,
        "samples per second": round(found["samples_per_second"], 1),
        "step ms, median": round(found["step_ms_median"], 3),
        "waiting for data, ms": round(data["ms_mean"], 3),
        "waiting for data, percent": round(data["percent"], 2),
        "peak memory, MiB": round(found["ranks"][0]["peak_memory_mib"], 1),
    })  # fmt: skip
