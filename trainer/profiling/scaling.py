"""`profiler.py scaling`: throughput on one device and on several."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from trainer.commands.flags import Flags
from trainer.loading.errors import BadInput
from trainer.logs.pictures import encode
from trainer.profiling.chart import draw_scaling
from trainer.profiling.flags import ScalingFlags
from trainer.profiling.processes import World, measure_world, num_usable_devices, trains_on_gpus
from trainer.profiling.report import note_of_cut_batch, table, write_json
from trainer.profiling.targets import unusable

ABOUT = (
    """How speed grows with devices: throughput, speed-up, efficiency and memory per process on one device, under
nn.DataParallel (where there are GPUs) and under DistributedDataParallel. Each is started in processes of its own,
several times and in turns, and medians are told.

--batch-size is per device, so more devices make larger steps ("weak scaling"); with --global-batch-size the step stays
the same and each device gets less of it ("strong scaling"). On the CPU give --num-threads 1: otherwise the one process
takes all cores, and several share them.""",
    """examples:
  python profiler.py scaling --world-sizes 1,2,4 --batch-size 64
  python profiler.py scaling --world-sizes 1,2 --device cpu --num-threads 1 --json scaling.json --board runs/scaling
  python profiler.py scaling --world-sizes 1,2,4,8 --global-batch-size 512""",
)


def problems(flags: Flags) -> list[str]:
    """What cannot be measured on this machine."""
    wanted, available = max(flags.tool.world_sizes), num_usable_devices(flags)
    if trains_on_gpus(flags) and wanted > available:
        return [f"--world-sizes {wanted}: {available} GPU{'s' * (available > 1)} can be used here; ask for fewer"]
    return []


def worlds(flags: Flags) -> list[World]:
    """What is measured, one device first."""
    several = sorted(set(flags.tool.world_sizes) - {1})
    modes = ("dp", "ddp") if trains_on_gpus(flags) else ("ddp",)
    return [World("single"), *(World(mode, n) for mode in modes for n in several)]  # type: ignore[arg-type]


def profile_scaling(flags: Flags, argv: Sequence[str]) -> None:
    """One command line. Raises BadInput, and Failure when a measurement fails."""
    tool: ScalingFlags = flags.tool
    chosen = worlds(flags)
    say_what_is_special(flags, chosen)
    found: dict[World, list[dict[str, Any]]] = {world: [] for world in chosen}
    for round_ in range(tool.rounds):
        for world in chosen:
            measured = measure_world(world, argv, ScalingFlags, tool.steps, tool.settling_steps)
            found[world].append(measured)
            rate = measured["samples_per_second"]
            print(f"round {round_ + 1}/{tool.rounds}  {world}: {rate:.0f} samples/s", flush=True)
    rows = summary(found)
    print(report(rows))
    for world in chosen:
        if note := note_of_cut_batch(found[world][0]):
            print(f"{world}: {note}")
    if tool.board is not None:
        draw(rows, tool.board)
    write_json(tool.json, {"command": "scaling", "rounds": tool.rounds, "steps": tool.steps, "worlds": rows})


def say_what_is_special(flags: Flags, chosen: Sequence[World]) -> None:
    """What a reader of the table has to know of this machine."""
    if not trains_on_gpus(flags):
        print("DataParallel needs at least two GPUs and none is in use: it is left out.")
        # OMP_NUM_THREADS may say it as well.
        if flags.devices.num_threads is None and torch.get_num_threads() > 1:
            print("Without --num-threads 1 one process takes all cores, and several share them.")
        most, cores = max(world.num_devices for world in chosen), num_usable_devices(flags)
        if most > cores:
            print(f"{most} processes share {cores} cores here: their speed says little.")


def summary(found: dict[World, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each world the medians over its rounds. Speed-up is taken within a round, on the machine as it is then."""
    alone = [measured["samples_per_second"] for measured in found[World("single")]]
    rows = []
    for world, rounds in found.items():
        rates = [measured["samples_per_second"] for measured in rounds]
        speedup = statistics.median(rate / single for rate, single in zip(rates, alone, strict=True))
        rows.append({
            "mode": world.mode,
            "num_devices": world.num_devices,
            "global_batch_size": rounds[0]["global_batch_size"],
            "samples_per_second": statistics.median(rates),
            "samples_per_second_of_rounds": rates,
            "speedup": speedup,
            "efficiency": speedup / world.num_devices,
            "step_ms_mean": statistics.median(measured["step_ms_mean"] for measured in rounds),
            "communication_ms_mean": statistics.median(m["phases"]["communication"]["ms_mean"] for m in rounds),
            "peak_memory_mib_per_process": max(r["peak_memory_mib"] for m in rounds for r in m["ranks"]),
        })  # fmt: skip
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    header = [
        "mode", "devices", "batch", "samples/s", "speed-up", "efficiency", "step ms", "communication ms",
        "peak MiB/process",
    ]  # fmt: skip
    return table(header, [
        [
            row["mode"],
            str(row["num_devices"]),
            str(row["global_batch_size"]),
            f"{row['samples_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['efficiency']:.0%}",
            f"{row['step_ms_mean']:.2f}",
            f"{row['communication_ms_mean']:.2f}",
            f"{row['peak_memory_mib_per_process']:.0f}",
        ]
        for row in rows
    ])  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes curves over the number of devices, and a picture of them. Raises BadInput if the folder cannot be used."""
    try:
        board = SummaryWriter(str(folder))
    except OSError as error:
        raise BadInput(unusable(f"--board {folder}", error, "folder")) from None
    for row in rows:
        mode = "ddp" if row["mode"] == "single" else row["mode"]
        for name in ("samples_per_second", "speedup", "efficiency"):
            board.add_scalar(f"scaling/{mode}/{name}", row[name], row["num_devices"])
    picture = encode(draw_scaling(rows))
    assert board.file_writer is not None
    board.file_writer.add_summary(Summary(value=[Summary.Value(tag="scaling/speedup", image=picture)]), 0)
    board.close()
    print(f"TensorBoard: tensorboard --logdir {folder}")
