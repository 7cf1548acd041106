"""`profiler.py step`: where the time of a training step goes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.commands.flags import Flags
from trainer.loading.errors import BadInput
from trainer.loop.run import Run
from trainer.parallel.base import Parallel
from trainer.profiling.excerpt import opened, train_steps
from trainer.profiling.flags import StepFlags
from trainer.profiling.measure import measure
from trainer.profiling.phases import PHASES, watched
from trainer.profiling.report import note_of_cut_batch, table, write_json
from trainer.profiling.targets import unusable

TRACED_STEPS = 5

ABOUT = (
    """Where the time of a training step goes: waiting for data, copy to the device, forward, backward, communication,
optimizer, logging and the rest. The trainer's own loop is measured, opened as main.py or main_multi_gpu.py would with
the same flags, in a folder that is thrown away: --save-dir is left alone.

On a GPU times are the device's: an event is put into its queue wherever the loop goes on to another phase, and all are
read at the end, so the loop is not slowed down. Work that the device does while the host waits for data is not counted
as waiting. Gradients are exchanged during the backward pass; "communication" holds what backward takes longer with the
exchange than without: to tell it, blocks of steps are trained both ways afterwards.""",
    """examples:
  python profiler.py step                                          the default task on its built-in data
  python profiler.py step --batch-size 128 --num-workers 2 --json step.json
  python profiler.py step --trace traces --steps 20                then: open the file in https://ui.perfetto.dev
  python profiler.py step --multi-gpu ddp --nproc 2 --device cpu
  torchrun --nproc_per_node=2 profiler.py step --multi-gpu ddp""",
)


def profile_step(flags: Flags, argv: Sequence[str], parallel: Parallel) -> None:
    """One command line on this process's devices; the main process reports. Raises BadInput."""
    tool: StepFlags = flags.tool
    with opened(flags, argv, parallel) as run:
        result = measure(run, tool.steps, tool.settling_steps)
        result["device"] = parallel.describe()
        if parallel.is_main:
            print(report(result), flush=True)
        if tool.trace is not None:
            written = trace(run, tool.trace)
            if parallel.is_main:
                print(
                    f"Trace of {TRACED_STEPS} steps: {written} (open it in https://ui.perfetto.dev or chrome://tracing)"
                )
        parallel.on_main(lambda: write_json(tool.json, {"command": "step", **result}))


def report(result: dict[str, Any]) -> str:
    """The results as text. Of several processes the first table is the main one's."""
    ranks = result["ranks"]
    keys = ("ms_mean", "ms_median", "ms_p90")
    rows = [
        [phase, *(f"{part[key]:.3f}" for key in keys), f"{part['percent']:.1f}"]
        for phase, part in result["phases"].items()
    ]
    rows.append(["step", *(f"{result[f'step_{key}']:.3f}" for key in keys), "100.0"])
    rate = f"{result['samples_per_second']:.0f} samples/s"
    average = "" if result["samples_per_step"].is_integer() else " on average"
    lines = [
        table(["" if len(ranks) == 1 else "rank 0", "ms mean", "median", "p90", "%"], rows),
        f"{result['steps']} steps of {round(result['samples_per_step'], 1):.10g} samples{average}: {rate}",
        *filter(None, [note_of_cut_batch(result)]),
    ]
    if len(ranks) == 1:
        return "\n".join([*lines, f"Peak memory: {ranks[0]['peak_memory_mib']:.0f} MiB"])
    cells = [
        [f"rank {i}", *(f"{rank['phases_ms_mean'][phase]:.3f}" for phase in PHASES), f"{rank['peak_memory_mib']:.0f}"]
        for i, rank in enumerate(ranks)
    ]
    return "\n".join([*lines, "", table(["ms mean", *PHASES, "peak MiB"], cells)])


def trace(run: Run, folder: Path) -> Path:
    """Trains a few steps under torch.profiler; returns the file that this process wrote. Raises BadInput.

    The phases of the loop are spans of that name in it.
    """
    path = folder / f"step_rank{run.parallel.shard[0]}.{os.getpid()}.pt.trace.json"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.parallel.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with watched(run, spans=True) as clock, torch.profiler.profile(activities=activities) as profile:
        clock.start()
        train_steps(run, TRACED_STEPS)
        clock.stop()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
    except OSError as error:
        raise BadInput(unusable(f"--trace {folder}", error, "folder")) from None
    return path
