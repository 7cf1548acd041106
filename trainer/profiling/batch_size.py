"""`profiler.py batch-size`: the largest batch that fits, and the fastest."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from trainer.commands.build import build_task, set_up_torch
from trainer.commands.flags import Flags
from trainer.config import names_given
from trainer.loop.run import Run
from trainer.parallel.base import Parallel
from trainer.profiling.excerpt import opened
from trainer.profiling.flags import BatchSizeFlags
from trainer.profiling.measure import measure
from trainer.profiling.report import table, write_json
from trainer.task import Task

FINEST = 16
"""The search ends when the largest batch that fits is known to one part in so many."""

ABOUT = (
    """The largest batch that fits on this device and the fastest one. Sizes are doubled until memory is full (or
--max-batch-size, or all training samples), then the limit is found by bisection, to one part in 16. Each size trains
with the trainer's own loop; --save-dir is left alone. The CPU has no error to run into, so it is only bounded.

The fastest is not the best to train with: see --global-batch-size, and --scale-lr, about what a larger one changes.""",
    """examples:
  python profiler.py batch-size                                    the default task on its built-in data
  python profiler.py batch-size --amp bf16 --max-batch-size 16384
  python profiler.py batch-size --device cpu --num-threads 1 --max-batch-size 256 --json sizes.json""",
)


def problems(flags: Flags, argv: Sequence[str]) -> list[str]:
    """Flags that do not go with it. argv: tells a --batch-size that was given from the default."""
    given = {}
    if flags.batch.global_batch_size is not None:
        given["--global-batch-size"] = flags.batch.global_batch_size
    if "--batch-size" in names_given(argv):
        given["--batch-size"] = flags.batch.batch_size
    found = [f"{name} {value}: leave it out; batch-size varies the batch" for name, value in given.items()]
    if flags.multi is not None:
        found.append("--multi-gpu: batch-size measures one device, as each of several needs the same; leave it out")
    return found


def profile_batch_sizes(flags: Flags, argv: Sequence[str], parallel: Parallel) -> None:
    """One command line. Raises BadInput."""
    tool: BatchSizeFlags = flags.tool
    set_up_torch(flags, parallel)
    task = build_task(flags)
    print(f"Device: {parallel.describe()}")
    available = min(task.num_samples(phase) for phase in task.phases)
    most = min(tool.max_batch_size, available)
    smallest = min(tool.min_batch_size, most)
    if smallest < tool.min_batch_size:
        print(f"--min-batch-size {tool.min_batch_size}: the training data has {available} samples; all are tried.")
    rows: list[dict[str, Any]] = []

    def fits(size: int) -> bool:
        row = of_size(flags, argv, parallel, task, size)
        rows.append({"batch_size": size, **row})
        rate = f"{row['samples_per_second']:.0f} samples/s" if row["fits"] else "out of memory"
        print(f"batch of {size}: {rate}", flush=True)
        return row["fits"]

    largest, is_limit = search(fits, smallest, most)
    rows.sort(key=lambda row: row["batch_size"])
    print(report(rows))
    fitting = [row for row in rows if row["fits"]]
    fastest = max(fitting, key=lambda row: row["samples_per_second"], default=None)
    if fastest is None:
        print(f"Not even a batch of {smallest} fits.")
    else:
        bound = "all training samples" if largest == available else "the largest tried"
        why = "the largest that fits" if is_limit else f"{bound}; all fit"
        print(f"Fastest: {fastest['batch_size']}. Largest: {largest} ({why}).")
    write_json(tool.json, {
        "command": "batch-size", "device": parallel.describe(), "batch_sizes": rows, "largest_batch_size": largest,
        "larger_ones_do_not_fit": is_limit, "fastest_batch_size": fastest["batch_size"] if fastest else None,
    })  # fmt: skip


def search(fits: Callable[[int], bool], smallest: int, most: int) -> tuple[int | None, bool]:
    """The largest size that fits, or None, to one part in FINEST; and whether there is any that does not.

    smallest: the first to try, at most `most`; doubled up to `most`, which is tried too.
    """
    size, good = smallest, None
    while fits(size):
        good = size
        if size == most:
            return good, False
        size = min(2 * size, most)
    bad = size
    while good is not None and bad - good > max(1, good // FINEST):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good, True


def of_size(flags: Flags, argv: Sequence[str], parallel: Parallel, task: Task, size: int) -> dict[str, Any]:
    """What a batch size achieves: `fits`, and if so `samples_per_second`, `step_ms_median` and `peak_memory_mib`."""
    tool: BatchSizeFlags = flags.tool
    flags = dataclasses.replace(flags, batch=dataclasses.replace(flags.batch, batch_size=size))
    with opened(flags, argv, parallel, task, quiet=True) as run:
        if had_to_go_lower(run):
            return {"fits": False}
        found = measure(run, tool.steps, tool.settling_steps)
        if had_to_go_lower(run):
            return {"fits": False}
    return {
        "fits": True,
        "samples_per_second": found["samples_per_second"],
        "step_ms_median": found["step_ms_median"],
        "peak_memory_mib": found["ranks"][0]["peak_memory_mib"],
    }


def had_to_go_lower(run: Run) -> bool:
    """Whether the run goes on with smaller micro-batches than it was asked for, because those did not fit."""
    return run.memory_limit.batch_size is not None


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    cells = [
        [str(row["batch_size"]), f"{row['samples_per_second']:.0f}", f"{row['step_ms_median']:.2f}",
         f"{row['peak_memory_mib']:.0f}"]
        if row["fits"]
        else [str(row["batch_size"]), "does not fit", "-", "-"]
        for row in rows
    ]  # fmt: skip
    return table(["batch", "samples/s", "step ms", "peak MiB"], cells)
