"""Measures the overhead of the trainer's loop over a hand-written loop on the GPU, with short steps and steps of 20 ms.

The host's work limits the speed of short steps, so any additional work shows. A step of 20 ms keeps the GPU busy, and
the host's work must overlap with it. Both loops train linear layers on the same batches with clipping and fused
AdamW, and alternate in one process in blocks of steps. Results are medians of the ratios of neighbouring blocks.
"""

import statistics
from contextlib import AbstractContextManager
from functools import partial

from benchmarks.autoencoder import Autoencoder
from benchmarks.on_gpu.part import Report, Setting
from benchmarks.on_gpu.ready import NUM_BATCHES, bare_step, in_turns, ms_of, ready_run
from trainer.loop.run import Run
from trainer.loop.windows import Window

LONG_STEP_MS = 20.0


class Short(Autoencoder):
    width, num_layers = 64, 3


class Long(Autoencoder):
    width, num_layers = 4096, 9


def measure(setting: Setting, report: Report) -> None:
    report.attempt("short step", lambda: compare(setting, report, "short step", Short, 64, 300))
    long = setting.pick(Long, Short)
    report.attempt("step of 20 ms", lambda: compare(setting, report, "step of 20 ms", long, long_batch(setting), 30))


def opened(
    setting: Setting, task: type[Autoencoder], size: int
) -> AbstractContextManager[tuple[Run, list[Window], int]]:
    more = ["--batch-size", size, "--num-train", NUM_BATCHES * size, "--cuda-graphs", "off"]
    return ready_run(setting, "--task", f"{__file__}:{task.__name__}", *more)


def long_batch(setting: Setting) -> int:
    """Returns the largest batch whose step in the hand-written loop takes at most 20 ms."""
    size, most = setting.pick((64, 16384), (4, 8))
    while size < most:
        with opened(setting, setting.pick(Long, Short), 2 * size) as (run, windows, _):
            ms = ms_of(run, [partial(bare_step, run, window) for window in windows])
        if statistics.median(ms) > LONG_STEP_MS:
            break
        size *= 2
    return size


def compare(setting: Setting, report: Report, name: str, task: type[Autoencoder], size: int, num_turns: int) -> None:
    with opened(setting, task, size) as (run, windows, _):
        ms, ratios = in_turns(run, windows, setting.pick(num_turns, 3))
    report.figure(f"{name}, batch, width, layers", [size, task.width, task.num_layers])
    report.figure(f"{name}, ms", ms)
    report.figure(f"{name}, ratio", round(statistics.median(ratios), 4))
    report.figure(f"{name}, quartiles of the ratio", [round(q, 4) for q in statistics.quantiles(ratios, n=4)])
