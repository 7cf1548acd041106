"""Measures throughput, speed-up, efficiency and memory on 1, 2, 4 ... devices.

Measures one device, nn.DataParallel (on GPUs) and DistributedDataParallel in turn, and reports medians of several
rounds. Every measurement starts new processes. --batch-size is per device, so the global batch grows with the number of
devices ("weak scaling"); --global-batch-size keeps it fixed ("strong scaling"). On the CPU pass --num-threads 1:
otherwise one process uses all cores, but several share them.

examples:
  python profiler.py scaling --world-sizes 1,2,4 --batch-size 64
  python profiler.py scaling --world-sizes 1,2 --device cpu --num-threads 1 --json scaling.json --board runs/scaling
  python profiler.py scaling --world-sizes 1,2,4,8 --global-batch-size 512
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from trainer.commands.flags import Flags
from trainer.common import forms
from trainer.config import flag
from trainer.parallel.devices import usable_cores
from trainer.profiling.measure import MeasuringFlags, measure_run
from trainer.profiling.processes import World, chosen_gpus, measure_in, warn_of_threads
from trainer.profiling.report import note_of_cut_batch, save_results, table


@dataclass
class ScalingFlags(MeasuringFlags):
    """Measuring how speed grows with the number of devices"""

    world_sizes: tuple[int, ...] = flag(
        (1, 2), "numbers of devices to compare, for example 1,2,4; one device is always measured", metavar="N",
        at_least=1,
    )  # fmt: skip
    rounds: int = flag(
        3, "number of measurements of each configuration; configurations take turns, and medians are reported",
        at_least=1,
    )  # fmt: skip
    board: Path | None = flag(
        None, "also write the results to this TensorBoard folder", metavar="DIR", from_record="refused"
    )


def problems(flags: Flags, argv: Sequence[str]) -> list[str]:
    """Returns a message if more GPUs are requested than can be used."""
    wanted, available = max(flags.tool.world_sizes), len(chosen_gpus(flags))
    if 0 < available < wanted:
        return [f"--world-sizes {wanted}: only {available} GPU{'s' * (available > 1)} can be used; choose fewer"]
    return []


def profile_scaling(flags: Flags, argv: Sequence[str]) -> None:
    """Runs the command `scaling`. Raises Failure if a measurement fails."""
    tool: ScalingFlags = flags.tool
    modes = [
        form.name for form in forms.FORMS.values() if not form.shards and (form.has_processes or chosen_gpus(flags))
    ]
    sizes = sorted(set(tool.world_sizes) - {1})
    worlds = [World("single"), *(World(mode, size) for mode in modes for size in sizes)]
    if not chosen_gpus(flags):
        print("Skipping DataParallel, which needs at least two GPUs.")
        warn_of_threads(flags)
        if worlds[-1].num_devices > len(usable_cores()):
            print(
                f"{worlds[-1].num_devices} processes share {len(usable_cores())} cores, so their speeds are unreliable."
            )
    found: dict[World, list[dict[str, Any]]] = {world: [] for world in worlds}
    for round_ in range(tool.rounds):
        for world in worlds:
            measured = measure_in(world, argv, ScalingFlags, measure_run)
            found[world].append(measured)
            rate = measured["samples_per_second"]
            print(f"round {round_ + 1}/{tool.rounds}  {world}: {rate:.0f} samples/s", flush=True)
    rows = summary(found)
    print(report(rows))
    for world in worlds:
        for note in note_of_cut_batch(found[world][0]):
            print(f"{world}: {note}")
    if tool.board is not None:
        write_board(rows, tool.board)
        print(f"TensorBoard: tensorboard --logdir {shlex.quote(str(tool.board))}")
    save_results(tool.json, {"command": "scaling", "rounds": tool.rounds, "steps": tool.steps, "worlds": rows})


def summary(found: Mapping[World, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns a row for each strategy and number of devices: medians over rounds, and the maximum of peak memory.

    A speed-up compares measurements of the same round.
    """
    alone = [measured["samples_per_second"] for measured in found[World("single")]]
    rows = []
    for world, rounds in found.items():
        rates = [measured["samples_per_second"] for measured in rounds]
        speedup = median(rate / single for rate, single in zip(rates, alone, strict=True))
        rows.append({
            "mode": world.mode, "num_devices": world.num_devices, "global_batch_size": rounds[0]["global_batch_size"],
            "samples_per_second": median(rates), "samples_per_second_of_rounds": rates,
            "speedup": speedup, "efficiency": speedup / world.num_devices,
            "step_ms_mean": median(measured["step_ms_mean"] for measured in rounds),
            "communication_ms_mean": median(m["phases"]["communication"]["ms_mean"] for m in rounds),
            "peak_memory_mib_per_process": max(r["peak_memory_mib"] for m in rounds for r in m["ranks"]),
        })  # fmt: skip
    return rows


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the results of `summary` as a table."""
    return table([
        ("mode", "mode", ""), ("devices", "num_devices", ""), ("batch", "global_batch_size", ""),
        ("samples/s", "samples_per_second", ".0f"), ("speed-up", "speedup", ".2f"),
        ("efficiency", "efficiency", ".0%"), ("step ms", "step_ms_mean", ".2f"),
        ("communication ms", "communication_ms_mean", ".2f"),
        ("peak MiB/process", "peak_memory_mib_per_process", ".0f"),
    ], rows)  # fmt: skip


def write_board(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Writes TensorBoard curves of throughput, speed-up and efficiency against the number of devices."""
    with SummaryWriter(str(folder)) as board:
        for row in rows:
            mode = forms.USUAL if row["mode"] == "single" else row["mode"]
            for name in ("samples_per_second", "speedup", "efficiency"):
                board.add_scalar(f"scaling/{mode}/{name}", row[name], row["num_devices"])
