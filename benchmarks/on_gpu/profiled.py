"""Runs `check`, `step` and `batch-size` of profiler.py, and trains with the largest batch that `batch-size` found."""

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.part import HELPERS, Ended, Report, Setting, run
from benchmarks.on_gpu.scarce import limited
from trainer.profiling.cli import main

WIDE = ["--task", f"{HELPERS / 'weighted_task.py'}:Weighted", "--width"]
MEMORY_BYTES = 2e9
"""Limit on the GPU's memory while `batch-size` runs."""


def measure(setting: Setting, report: Report) -> None:
    for part in (check, step, batch_size):
        report.attempt(part.__name__, partial(part, setting, report))


def check(setting: Setting, report: Report) -> None:
    few = ["--nproc", 1] if setting.is_small else []
    found = profiled(setting, "check", "--save-dir", setting.folder, *few)
    for finding in found["findings"]:
        report.check(f"check, {finding['subject']}", finding["level"] != "BROKEN", finding["text"])


def step(setting: Setting, report: Report) -> None:
    steps = ["--steps", setting.pick(200, 2), "--settling-steps", setting.pick(30, 1)]
    found = profiled(setting, "step", *steps, *setting.where)
    for name in ("step_ms_median", "step_ms_p90", "samples_per_second"):
        report.figure(f"step, {name}", found[name])
    report.figure("step, phases, ms", {name: round(phase["ms_mean"], 4) for name, phase in found["phases"].items()})
    report.figure("step, peak_memory_mib", found["ranks"][0]["peak_memory_mib"])


def batch_size(setting: Setting, report: Report) -> None:
    """Checks that the batch size found for a limit, minus the search's tolerance of 1/16, trains within the limit."""
    width, most = (2048, 65536) if setting.is_gpu else (16, 32)
    wide = [*WIDE, width, "--num-train", most, *setting.where]
    steps = ["--steps", setting.pick(5, 1), "--settling-steps", 1]
    with limited(setting, MEMORY_BYTES):
        found = profiled(setting, "batch-size", *wide, "--max-batch-size", most, *steps)
        largest = found["largest_batch_size"]
        report.figure("batch-size, largest", largest)
        report.figure("batch-size, fastest", found["fastest_batch_size"])
        if setting.is_gpu:
            report.check("batch-size, larger ones do not fit", found["larger_ones_do_not_fit"])
        gc.collect()
        size = largest - largest // 16
        directory = run(setting, "largest", *wide, "--batch-size", size, "--max-steps", 2)
    report.check(f"batch-size, {size} samples train", not (directory / "memory.json").exists())


def profiled(setting: Setting, command: str, *flags: object) -> dict[str, Any]:
    """Returns the JSON that a command line of profiler.py writes. Raises Ended if it writes none."""
    results: Path = setting.folder / f"{command}.json"
    device = ["--device", setting.device] if command == "check" else []
    argv = list(map(str, [command, "--json", results, *device, *flags]))
    print("profiler.py", *argv, flush=True)
    status = main(argv)
    if not results.exists():
        raise Ended(f"profiler.py {command} ended with status {status}")
    return json.loads(results.read_text())
