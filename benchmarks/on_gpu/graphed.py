"""Checks that steps replayed as CUDA graphs are bit-identical to eager steps, and measures their speed.

Every model, and each entry of SETTINGS, trains deterministically with `--cuda-graphs off` and `on`, in parallel. The
last checkpoints must be identical to the bit, and steps must be replayed as graphs. Speed is measured by ready.py,
while nothing else runs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu import ranks, ready
from benchmarks.on_gpu.models import MODELS, chosen
from benchmarks.on_gpu.part import HELPERS, ROOT, Report, Setting, checkpoint_of_step, graphs_watched, last, run, unlike

FIRST = ("sasrec", "harnet", "lightgcn", "plmu")
NUM_AT_ONCE, THREADS = 8, 2
TIMES, NUM_MODELS = 5.0, 11
"""Goals: the minimum speedup over eager steps and other trainers, and the minimum number of models that reach it."""
OFF = ["--cuda-graphs", "off"]
STEPS = 30
BITS = [
    "--deterministic", "--max-steps", STEPS, "--batch-size", 8, "--eval-batch-size", 64, "--eval-every-steps", STEPS,
    "--ema-decay", 0.9, "--no-test", "--log-interval", 1000, "--num-workers", 0,
]  # fmt: skip
SMALL = [
    "--task", f"{ROOT / 'benchmarks' / 'on_gpu' / 'gpu_tasks.py'}:LatePoisoned", "--poison", "input", "--num-train", 50,
    "--epochs", 4, "--batch-size", 4, "--lr", 0.01, "--deterministic", "--log-interval", 1000,
]  # fmt: skip
SETTINGS: dict[str, list[object]] = {
    "skipped steps, batch norm, average": [
        *SMALL, "--poisoned", 3, "--on-nonfinite", "skip", "--batch-norm", "--ema-decay", 0.9,
    ],
    "accumulation, short windows": [*SMALL, "--grad-accum-steps", 3, "--max-grad-norm", 0],
    "sgd": [*SMALL, "--amp", "off", "--optimizer", "sgd", "--momentum", 0.9, "--dropout", 0.3],
    "two phases, frozen parts": [
        "--task", f"{HELPERS / 'pieces_task.py'}:Pieces", "--epochs", 6, "--batch-size", 2, "--global-batch-size", 4,
        "--lr", 0.02, "--max-grad-norm", 0.3, "--poisoned", "--on-nonfinite", "skip", "--deterministic",
    ],
}  # fmt: skip
FURTHER: dict[str, list[object]] = {
    "compiled": ["--task", "har", *BITS, "--compile"],
    "blocks that are computed twice": ["--task", "seqrec", *BITS, "--grad-checkpointing"],
}
"""Flags of runs that are skipped on a CPU and with --small."""
RESUMED = [*SMALL, "--epochs", 3, "--save-every-steps", 10, "--keep-checkpoints", 0, "--dropout", 0.2]


def measure(setting: Setting, report: Report) -> None:
    names = sorted(chosen(setting, on_cpu="bprmf"), key=lambda name: name not in FIRST)
    first = [name for name in names if name in FIRST]
    ms: dict[str, dict[str, float]] = {}

    def measured(of: Callable[..., dict[str, float]], name: str) -> None:
        ms[name] = ms.get(name, {}) | of(setting, report, name)

    for name in first:
        report.attempt(f"{name}, speed", partial(measured, ready.speed, name))
    further = [*FURTHER, *ranks.GRAPHED] if setting.is_gpu and not setting.is_small else []
    side_by_side(setting, report, [*names, *SETTINGS, "resumed", *further])
    for name in names[len(first) :]:
        report.attempt(f"{name}, speed", partial(measured, ready.speed, name))
    fast = [name for name, own in ms.items() if own["eager loop"] >= TIMES * own.get("loop with graphs", 1e9)]
    ready.judge(setting, report, f"models {TIMES:g} times faster with graphs", len(fast) >= NUM_MODELS, fast)
    for name in first:
        report.attempt(f"{name}, other trainers", partial(measured, ready.beside, name))
        for other in ms[name].keys() & ready.OTHERS.keys() if "loop with graphs" in ms.get(name, {}) else ():
            ratio = round(ms[name][other] / ms[name]["loop with graphs"], 2)
            is_fast = ratio >= TIMES or "compiled" in other
            ready.judge(setting, report, f"{name}, times faster than {other}", is_fast, ratio)


def side_by_side(setting: Setting, report: Report, names: Sequence[str]) -> None:
    """Calls `bits` for several models or settings, in parallel or, with --small, one after another."""
    if setting.is_small:
        for name in names:
            report.attempt(name, partial(bits, setting, report, name))
        return

    def tell(done: Future[list[dict[str, Any]]]) -> None:
        for found in done.result():
            report.tell(found)

    with ProcessPoolExecutor(NUM_AT_ONCE, get_context("spawn"), max_tasks_per_child=1) as processes:
        started = {processes.submit(bits_found, setting, name): name for name in names}
        for done in as_completed(started):
            report.attempt(started[done], partial(tell, done))


def bits_found(setting: Setting, name: str) -> list[dict[str, Any]]:
    torch.set_num_threads(THREADS)
    found: list[dict[str, Any]] = []
    report = Report(found.append)
    report.attempt(name, partial(bits, setting, report, name))
    return found


def bits(setting: Setting, report: Report, name: str) -> None:
    """Compares checkpoints of runs with and without graphs. name: model, key of SETTINGS or FURTHER, or "resumed"."""
    if name in MODELS:
        for amp in setting.pick(("off", "bf16", "fp16"), ("off",)):
            title, flags = f"{name}, {amp}", [*MODELS[name], *BITS, "--amp", amp]
            report.attempt(title, partial(compare, setting, report, title, flags))
    elif name in SETTINGS | FURTHER:
        compare(setting, report, name, (SETTINGS | FURTHER)[name])
    elif name in ranks.GRAPHED:
        ranks.compare_graphs(setting, report, name, ranks.GRAPHED[name])
    else:
        resume(setting, report, name)


def compare(setting: Setting, report: Report, name: str, flags: Sequence[object]) -> None:
    eager = run(setting, f"{name}, eager", *flags, *OFF)
    judge(setting, report, name, partial(graphed, setting, f"{name}, graphed", flags), eager)


def graphed(setting: Setting, name: str, flags: Sequence[object]) -> Path:
    """Runs a command line with `--cuda-graphs on`, on a CPU with `auto`; returns its run directory."""
    return run(setting, name, *flags, "--cuda-graphs", "on" if setting.is_gpu else "auto")


def resume(setting: Setting, report: Report, name: str) -> None:
    """Checks runs that switch between eager steps and graphs when they resume within an epoch."""
    eager = run(setting, f"{name}, eager", *RESUMED, *OFF)

    def there_and_back() -> Path:
        start = ["--resume-from", checkpoint_of_step(eager, 10)]
        replayed = graphed(setting, f"{name}, graphed", [*RESUMED, *start])
        return run(setting, f"{name}, back", *RESUMED, *OFF, "--resume-from", checkpoint_of_step(replayed, 20))

    judge(setting, report, name, there_and_back, eager)


def judge(setting: Setting, report: Report, name: str, with_graphs: Callable[[], Path], eager: Path) -> None:
    """Checks that a run with graphs ends with the same checkpoint as a run without graphs."""
    with graphs_watched() as found:
        different = unlike(last(with_graphs()), last(eager))
    value = {
        "differs first": different[0] if different else None, "captures": found.num_captured,
        "replays": len(found.replayed), "lines": found.lines,
    }  # fmt: skip
    is_graphed = not setting.is_gpu or (bool(found.replayed) and not found.lines)
    report.check(name, not different and is_graphed, value)
