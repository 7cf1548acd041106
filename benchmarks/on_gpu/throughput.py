"""Measures samples per second of every model in float32, bf16 and fp16, with and without CUDA graphs.

The models train in the trainer's loop, as in `profiler.py step`. The share of time spent waiting for data and the peak
memory of tensors are reported, too.
"""

from functools import partial

from benchmarks.on_gpu.models import BATCH_SIZES, MODELS, chosen
from benchmarks.on_gpu.part import Report, Setting, measured_steps
from trainer.profiling.phase_clock import DATA

PRECISIONS = {kind: ["--amp", kind, "--cuda-graphs", "off"] for kind in ("off", "bf16", "fp16")}
WITH_GRAPHS = {f"{kind}, graphs": ["--amp", kind, "--cuda-graphs", "on"] for kind in ("off", "bf16")}


def measure(setting: Setting, report: Report) -> None:
    """Measures one precision after another, so that an interrupted run has the first precisions for all models."""
    kinds = PRECISIONS | (WITH_GRAPHS if setting.is_gpu else {})
    for kind, flags in sorted(kinds.items(), key=lambda kind: [*PRECISIONS].index(kind[0].split(",")[0])):
        for name in chosen(setting, on_cpu="bprmf"):
            report.attempt(f"{name}, {kind}", partial(of_model, setting, report, name, kind, flags))


def of_model(setting: Setting, report: Report, name: str, kind: str, more: list[str]) -> None:
    batch_size = setting.pick(BATCH_SIZES[MODELS[name][1]], 4)
    settling = 60 if kind in WITH_GRAPHS else 10  # until most shapes have occurred twice
    steps = setting.pick((30, settling), (2, 1))
    found = measured_steps(setting, *steps, *MODELS[name], "--batch-size", batch_size, *more)
    data = found["phases"][DATA]
    report.figure(f"{name}, {kind}", {
        "batch size": found["global_batch_size"],
        "samples per second": round(found["samples_per_second"], 1),
        "step ms, median": round(found["step_ms_median"], 3),
        "waiting for data, ms": round(data["ms_mean"], 3),
        "waiting for data, percent": round(data["percent"], 2),
        "peak memory, MiB": round(found["ranks"][0]["peak_memory_mib"], 1),
    })  # fmt: skip
