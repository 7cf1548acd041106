"""Checks that weights and scores of every model, trained in float64, differ by less than 1e-9 between GPU and CPU.

Float64 is precise enough to distinguish rounding from errors. After a few steps from the same initial weights, weights
and validation scores are compared. Without a GPU, a CPU run with half the micro-batch replaces the GPU's run.
"""

from functools import partial

from benchmarks.on_gpu.models import chosen, without_dropout
from benchmarks.on_gpu.part import Report, Setting, difference, last, metrics, run

LIMIT = 1e-9
FLAGS = ["--dtype", "float64", "--data-on", "host", "--schedule", "constant"]
FLAGS += ["--eval-batch-size", "64", "--no-test", "--ema-decay", "0.9"]
BATCH_SIZE = 4


def measure(setting: Setting, report: Report) -> None:
    for name in chosen(setting, on_cpu="kg-lightgcn"):
        report.attempt(name, partial(compare, setting, report, name))


def compare(setting: Setting, report: Report, name: str) -> None:
    flags = [*without_dropout(name), *FLAGS, "--max-steps", setting.pick(4, 2), "--global-batch-size", BATCH_SIZE]
    here = run(setting, f"{name} cpu", *flags, "--batch-size", BATCH_SIZE, device="cpu")
    other_size = BATCH_SIZE if setting.is_gpu else BATCH_SIZE // 2
    there = run(setting, f"{name} {setting.device} again", *flags, "--batch-size", other_size)
    found = difference(last(there)["model"], last(here)["model"])
    report.check(f"{name}, weights", found < LIMIT, found)
    expected, scores = metrics(here), metrics(there)
    found = max(abs(scores[key] - value) / max(abs(value), 1e-3) for key, value in expected.items())
    report.check(f"{name}, scores", found < LIMIT, found)
