"""Finds the largest batch size that fits on this device, and the fastest batch size.

Doubles the batch size until it does not fit in memory (or reaches --max-batch-size or all training samples), then
bisects until the limit is known to within 1/16. Each size is measured in the trainer's own training loop; --save-dir
is not used. On the CPU, memory does not limit the search. The fastest batch size may not train best: a larger batch
size usually needs another learning rate (see --scale-lr).

examples:
  python profiler.py batch-size                                    the default task on its built-in data
  python profiler.py batch-size --amp bf16 --max-batch-size 16384
  python profiler.py batch-size --device cpu --num-threads 1 --max-batch-size 256 --json sizes.json
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.commands.build import build_task, set_up_torch
from trainer.commands.flags import Flags
from trainer.config import flag, names_given
from trainer.loop.memory import free_memory
from trainer.parallel.strategy import Strategy
from trainer.profiling.measure import MeasuredRun, MeasuringFlags, opened
from trainer.profiling.report import save_results, table
from trainer.task import Task

FINEST = 16
"""The search ends when the smallest size that does not fit is at most 1 / FINEST larger than the largest that fits."""


@dataclass
class BatchSizeFlags(MeasuringFlags):
    """Measuring batch sizes"""

    min_batch_size: int = flag(8, "smallest batch size to try; each further size is twice the one before", at_least=1)
    max_batch_size: int = flag(1024, "largest batch size to try", at_least=1)
    steps: int = flag(20, "optimizer steps per measurement", at_least=1)
    settling_steps: int = flag(3, "untimed warm-up steps before each measurement", at_least=1)

    def problems(self) -> list[str]:
        if self.max_batch_size < self.min_batch_size:
            return [f"--max-batch-size {self.max_batch_size}: must be at least --min-batch-size {self.min_batch_size}"]
        return []


def problems(flags: Flags, argv: Sequence[str]) -> list[str]:
    """Returns a message for each training flag that this command refuses. argv: command line as given."""
    found, advice = [], "profiler.py batch-size chooses the sizes; leave this flag out"
    if flags.batch.global_batch_size is not None:
        found.append(f"--global-batch-size {flags.batch.global_batch_size}: {advice}")
    if "--batch-size" in names_given(argv):
        found.append(f"--batch-size {flags.batch.batch_size}: {advice}")
    if flags.multi is not None:
        found.append("--multi-gpu: profiler.py batch-size measures one device; leave the flag out")
    return found


def profile_batch_sizes(flags: Flags, argv: Sequence[str], strategy: Strategy) -> None:
    """Runs the command `batch-size`."""
    tool: BatchSizeFlags = flags.tool
    set_up_torch(flags, strategy.group)
    task = build_task(flags)
    print(f"Device: {strategy.describe()}")
    available = min(task.num_samples(phase) for phase in task.phases)
    most = min(tool.max_batch_size, available)
    smallest = min(tool.min_batch_size, most)
    if smallest < tool.min_batch_size:
        print(f"--min-batch-size {tool.min_batch_size}: starting at {smallest}, the number of training samples.")
    rows: list[dict[str, Any]] = []

    def fits(size: int) -> bool:
        found = of_size(flags, argv, strategy, task, size)
        rows.append({"batch_size": size, "fits": found is not None, **(found or {})})
        rate = f"{found['samples_per_second']:.0f} samples/s" if found else "out of memory"
        print(f"batch of {size}: {rate}", flush=True)
        return found is not None

    largest, is_limit = search(fits, smallest, most)
    rows.sort(key=lambda row: row["batch_size"])
    print(table([
        ("batch", "batch_size", ""), ("samples/s", "samples_per_second", ".0f"), ("step ms", "step_ms_median", ".2f"),
        ("peak MiB", "peak_memory_mib", ".0f"),
    ], [row if row["fits"] else {**row, "samples_per_second": "does not fit"} for row in rows]))  # fmt: skip
    fitting = [row for row in rows if row["fits"]]
    fastest = max(fitting, key=lambda row: row["samples_per_second"])["batch_size"] if fitting else None
    if largest is None:
        print(f"Not even a batch size of {smallest} fits into memory{'; lower --min-batch-size' * (smallest > 1)}.")
    else:
        bound = "all training samples" if largest == available else "the largest tried"
        why = "the largest that fits" if is_limit else f"{bound}; all fit"
        print(f"Fastest: {fastest}. Largest: {largest} ({why}).")
    save_results(tool.json, {
        "command": "batch-size", "device": strategy.describe(), "batch_sizes": rows, "largest_batch_size": largest,
        "larger_ones_do_not_fit": is_limit, "fastest_batch_size": fastest,
    })  # fmt: skip


def search(fits: Callable[[int], bool], smallest: int, most: int) -> tuple[int | None, bool]:
    """Returns the largest size that fits (None if none does), and whether any tried size did not fit.

    fits: function that tries a size. smallest: the first size to try, at most `most`. most: the largest size to try.
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


def of_size(flags: Flags, argv: Sequence[str], strategy: Strategy, task: Task, size: int) -> dict[str, float] | None:
    """Returns `samples_per_second`, `step_ms_median` and `peak_memory_mib` of a batch size; None if it does not fit."""
    found = _measured(flags, argv, strategy, task, size)
    free_memory()  # reference cycles keep a run's memory
    return found


def _measured(flags: Flags, argv: Sequence[str], strategy: Strategy, task: Task, size: int) -> dict[str, float] | None:
    flags = replace(flags, batch=replace(flags.batch, batch_size=size))
    with opened(flags, argv, strategy, task, quiet=True) as run:
        # on a GPU, opening the run tries the batch size, and sets memory.limit if the size does not fit
        memory = run.memory
        counts = flags.tool.steps, flags.tool.settling_steps
        found = MeasuredRun(run).measure(*counts) if memory.limit.batch_size is None else None
        if found is None or memory.limit.batch_size is not None:
            return None
    names = ("samples_per_second", "step_ms_median")
    return {**{name: found[name] for name in names}, "peak_memory_mib": found["ranks"][0]["peak_memory_mib"]}
