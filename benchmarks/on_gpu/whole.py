"""Measures the wall-clock time of whole commands, from start to exit, and how busy they keep the GPU.

Real data are expected in the folder LOCKSTEP_DATA; commands whose data are missing are left out.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.on_gpu import ready
from benchmarks.on_gpu.models import chosen
from benchmarks.on_gpu.part import ROOT, Report, Setting, measured_steps

GRAPHS = ["--cuda-graphs", "on"]
NOTHING = "import torch; torch.zeros(1, device='{device}'); import main, tasks"
"""Program that imports torch and the trainer and creates the CUDA context, which every command must do."""
BUSY, NUM_BUSY = 0.8, 12
"""Goal: the minimum share of a step in which the GPU replays graphs, and the minimum number of models that reach it."""
LEAST_TABLES = {"off": 3000, "bf16": 3500}
"""Goal: minimum number of tables per second of the model nano, by precision."""
ML_1M = "ml-1m/ml-1m_complete_order.txt.gz"


class Whole(NamedTuple):
    """Command and its goals. data: path within LOCKSTEP_DATA. most_s: maximum seconds. metrics: minimum test scores."""

    data: str
    flags: list[str]
    most_s: float
    metrics: dict[str, float] = {}


WHOLE = {
    "har": Whole("uci_har/UCI HAR Dataset.zip", ["--epochs", "20", "--refit", "--seeds", "3"], 36, {"accuracy": 0.98}),
    "sasrec, published": Whole(ML_1M, ["--config", "configs/seqrec/sasrec_published.toml"], 40),
    "sasrec, softmax": Whole(
        ML_1M, ["--config", "configs/seqrec/sasrec_softmax.toml", "--seeds", "3"], 180,
        {"hr@10": 0.313, "ndcg@10": 0.182},
    ),
    "speech": Whole("fsdd/recordings.tar.gz", ["--task", "speech"], 30),
    "kg-lightgcn": Whole("kgat/lfm1m.zip", ["--task", "kgat", "--model", "kg-lightgcn"], 30),
}  # fmt: skip


def measure(setting: Setting, report: Report) -> None:
    nothing_s = seconds_of(["-c", NOTHING.format(device=setting.device)])
    report.figure("imports and context, s", round(nothing_s, 2))
    report.attempt("start", partial(start, setting, report, nothing_s))
    for name in WHOLE if not setting.is_small else ():
        report.attempt(name, partial(whole, setting, report, name))
    names = chosen(setting, on_cpu="bprmf")
    shares = {name: busy(setting, report, name) for name in names} if setting.is_gpu else {}
    often = [name for name, share in shares.items() if share >= BUSY]
    ready.judge(setting, report, f"models that are busy for {BUSY:.0%} of a step", len(often) >= NUM_BUSY, often)
    for amp, least in LEAST_TABLES.items() if setting.is_gpu else ():
        report.attempt(f"nano, {amp}", partial(tables, setting, report, amp, least))


def seconds_of(arguments: Sequence[object]) -> float:
    """Returns the seconds that a Python program takes in a process of its own."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=True)
    return time.perf_counter() - started


def command(setting: Setting, name: str, *flags: object) -> list[object]:
    return ["main.py", *flags, "--save-dir", setting.folder / name, *setting.where]


def start(setting: Setting, report: Report, nothing_s: float) -> None:
    """Measures the time from a command's start to the end of its first step, with generated data in the cache."""
    flags = ["--max-steps", 1, "--no-test", "--eval-every-steps", 1000]
    for name in ("filled", "start"):
        seconds = seconds_of(command(setting, name, *flags))
    ready.judge(setting, report, "start beyond that, s", seconds - nothing_s <= 3, round(seconds - nothing_s, 2))


def whole(setting: Setting, report: Report, name: str) -> None:
    own, folder = WHOLE[name], os.environ.get("LOCKSTEP_DATA", "")
    data = Path(folder) / own.data
    if not folder or not data.exists():
        report.figure(name, f"left out: {own.data} is not in LOCKSTEP_DATA")
        return
    seconds = seconds_of(command(setting, name, *own.flags, "--data-dir", data, *GRAPHS))
    report.check(f"{name}, s", seconds <= own.most_s, round(seconds, 1))
    if own.metrics:
        mean = json.loads((setting.folder / name / "summary.json").read_text())["mean"]
        for metric, least in own.metrics.items():
            report.check(f"{name}, mean {metric}", mean[f"test/{metric}"] >= least, mean[f"test/{metric}"])


def busy(setting: Setting, report: Report, name: str) -> float:
    """Returns the time of a step's graph replay divided by the time of a whole step in the trainer's loop."""
    ms = ready.speed(setting, report, name)
    found = with_graphs(setting, name, "off")
    share = round(ms["its replay"] / found["step_ms_mean"], 3)
    report.figure(f"{name}, busy", share)
    return share


def tables(setting: Setting, report: Report, amp: str, least: int) -> None:
    found = with_graphs(setting, "nano", amp)["samples_per_second"]
    ready.judge(setting, report, f"nano, {amp}, tables a second", found >= least, round(found))


def with_graphs(setting: Setting, name: str, amp: str) -> dict[str, Any]:
    flags = [*ready.model_flags(setting, name), *GRAPHS, "--amp", amp]
    return measured_steps(setting, *setting.pick((200, 60), (2, 1)), *flags)
