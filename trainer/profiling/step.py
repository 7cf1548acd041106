"""Measures the time of a training step by phase; optionally writes a trace.

Runs the trainer's own loop, as main.py or main_multi_gpu.py does with the same flags, in a temporary folder instead of
--save-dir. Measuring does not slow the loop down: on a GPU the loop records a CUDA event at the start of each phase,
and the events are read at the end. docs/profiling.md defines the phases.

examples:
  python profiler.py step                                          the default task on its built-in data
  python profiler.py step --batch-size 128 --num-workers 2 --json step.json
  python profiler.py step --trace traces --steps 20                then: open the file in https://ui.perfetto.dev
  python profiler.py step --multi-gpu ddp --nproc 2 --device cpu
  torchrun --nproc_per_node=2 profiler.py step --multi-gpu ddp
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.commands.flags import Flags
from trainer.config import flag
from trainer.parallel.strategy import Strategy
from trainer.profiling.measure import MeasuredRun, MeasuringFlags, opened
from trainer.profiling.phase_clock import PHASES
from trainer.profiling.report import note_of_cut_batch, save_results, table

PEAK = "peak_memory_mib"
TRACED_STEPS = 5
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"


@dataclass
class StepFlags(MeasuringFlags):
    """Measuring a step"""

    steps: int = flag(100, "optimizer steps per measurement", at_least=1)
    trace: Path | None = flag(
        None, f"also write a trace of {TRACED_STEPS} more steps to this folder, for {VIEWERS}; TensorBoard needs the "
        "package torch-tb-profiler to show the trace", metavar="DIR", from_record="refused",
    )  # fmt: skip


def profile_step(flags: Flags, argv: Sequence[str], strategy: Strategy) -> None:
    """Runs the command `step` on this process's devices; rank 0 prints and saves the results."""
    tool: StepFlags = flags.tool
    with opened(flags, argv, strategy) as run:
        measured = MeasuredRun(run)
        result = measured.measure(tool.steps, tool.settling_steps)
        result["device"] = strategy.describe()
        if strategy.group.is_main:
            print(report(result), flush=True)
        written = measured.trace(TRACED_STEPS, tool.trace) if tool.trace is not None else None
        if strategy.group.is_main:
            if written is not None:
                print(f"Trace of {TRACED_STEPS} steps: {written} (open it in {VIEWERS})")
            save_results(tool.json, {"command": "step", **result})


def report(result: Mapping[str, Any]) -> str:
    """Formats the results; with several processes, the first table shows rank 0."""
    ranks = result["ranks"]
    step = {name.removeprefix("step_"): value for name, value in result.items() if name.startswith("step_")}
    average = "" if result["samples_per_step"].is_integer() else " on average"
    lines = [
        table([
            ("" if len(ranks) == 1 else "rank 0", "phase", ""), ("ms mean", "ms_mean", ".3f"),
            ("median", "ms_median", ".3f"), ("p90", "ms_p90", ".3f"), ("%", "percent", ".1f"),
        ], [
            *({"phase": phase, **part} for phase, part in result["phases"].items()),
            {"phase": "step", **step, "percent": 100.0},
        ]),
        f"{result['steps']} steps of {round(result['samples_per_step'], 1):.10g} samples{average}: "
        f"{result['samples_per_second']:.0f} samples/s",
        *note_of_cut_batch(result),
    ]  # fmt: skip
    if len(ranks) == 1:
        return "\n".join([*lines, f"Peak memory: {ranks[0][PEAK]:.0f} MiB"])
    columns = [("ms mean", "rank", ""), *((phase, phase, ".3f") for phase in PHASES), ("peak MiB", PEAK, ".0f")]
    rows = [{"rank": f"rank {i}", PEAK: rank[PEAK], **rank["phases_ms_mean"]} for i, rank in enumerate(ranks)]
    return "\n".join([*lines, "", table(columns, rows)])
