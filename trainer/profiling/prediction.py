"""`profiler.py predict`: the speed of more devices than there are here."""

import dataclasses
import functools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.commands.flags import Flags, parse
from trainer.config import refuse
from trainer.parallel.base import Parallel
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.errors import Failure
from trainer.parallel.launch import launch
from trainer.profiling.exchange import LARGE_BYTES, large_sum_s, latency_s
from trainer.profiling.flags import PredictFlags
from trainer.profiling.phases import BACKWARD
from trainer.profiling.processes import (
    World,
    for_several_devices,
    measure_world,
    num_usable_devices,
    on_devices,
    trains_on_gpus,
)
from trainer.profiling.report import table, write_json
from trainer.profiling.step_model import Compute, Link, buckets, predict

ABOUT = (
    """The speed to expect of more devices than there are here, under DistributedDataParallel. A step of one device and
an all-reduce between the devices of this machine are measured; bandwidth and latency can be given instead, for example
those of a network.

The model: t(n) = t(1) + what of the exchange is not hidden. A bucket of B bytes takes 2 (n-1)/n B / bandwidth +
2 (n-1) latency, as in a ring. All buckets but the last are exchanged while the backward of the last micro-batch runs;
the last one, ready when it ends, is always waited for. It assumes equally fast devices that do not disturb each other,
as many samples per device as here, data and --log-interval that cost what they cost on one device, and a single ring:
where NCCL builds trees, latency grows more slowly.""",
    """examples:
  python profiler.py predict --world-sizes 8,64,512
  python profiler.py predict --world-sizes 64 --bandwidth-gb-s 12 --latency-us 8
  python profiler.py predict --world-sizes 2,8 --device cpu --num-threads 1 --validate""",
)


def problems(flags: Flags) -> list[str]:
    """Flags that do not go with it, and measurements that need more devices than there are."""
    found, tool = [], flags.tool
    if flags.batch.global_batch_size is not None:
        found.append(
            f"--global-batch-size {flags.batch.global_batch_size}: leave it out; each device is to have as many "
            "samples as one has here (--batch-size)"
        )
    is_given = tool.bandwidth_gb_s is not None and tool.latency_us is not None
    alone = trains_on_gpus(flags) and num_usable_devices(flags) < 2
    if alone and not is_given:
        found.append("--bandwidth-gb-s and --latency-us: give both; one GPU has no other to measure them with")
    if alone and tool.validate:
        found.append("--validate: there is one GPU; leave it out")
    return found


def predict_scaling(flags: Flags, argv: Sequence[str]) -> None:
    """One command line. Raises BadInput, and Failure when a measurement fails."""
    tool: PredictFlags = flags.tool
    largest = World("ddp", num_usable_devices(flags) if trains_on_gpus(flags) else 2)
    if not trains_on_gpus(flags) and flags.devices.num_threads is None and torch.get_num_threads() > 1:
        print("Without --num-threads 1 the one process that is measured takes all cores; several would share them.")
    link = measured_link(flags, argv, largest)
    worlds = [World("single"), *([largest] if tool.validate else [])]
    found: dict[World, list[dict[str, Any]]] = {world: [] for world in worlds}
    for _ in range(tool.rounds):
        for world in worlds:
            found[world].append(measure_world(world, argv, PredictFlags, tool.steps, tool.settling_steps))
    alone = found[worlds[0]]
    compute = compute_of(alone, flags.batch.grad_accum_steps)
    sizes = sorted({*tool.world_sizes, *([largest.num_devices] if tool.validate else [])})
    rows = [row(compute, link, size, alone[0]["global_batch_size"]) for size in sizes]
    if tool.validate:
        compare(next(r for r in rows if r["num_devices"] == largest.num_devices), found[largest])
    print(report(compute, link, rows))
    write_json(tool.json, {
        "command": "predict", "step_ms": 1e3 * compute.step_s, "last_backward_ms": 1e3 * compute.last_backward_s,
        "bucket_bytes": list(compute.bucket_bytes), "latency_us": 1e6 * link.latency_s,
        "bandwidth_gb_s": link.bandwidth / 1e9, "worlds": rows,
    })  # fmt: skip


def compute_of(rounds: Sequence[dict[str, Any]], grad_accum_steps: int) -> Compute:
    """From several measurements of one device, whose backward is that of all micro-batches of a step."""
    backward_ms = statistics.median(m["phases"][BACKWARD]["ms_median"] for m in rounds)
    return Compute(
        step_s=statistics.median(m["step_ms_median"] for m in rounds) / 1e3,
        last_backward_s=backward_ms / grad_accum_steps / 1e3,
        bucket_bytes=buckets(rounds[0]["gradient_bytes"]),
    )


def row(compute: Compute, link: Link, world_size: int, batch_size: int) -> dict[str, Any]:
    """What is predicted of so many devices. batch_size: samples of one device's step."""
    predicted = predict(compute, link, world_size)
    return {
        "num_devices": world_size,
        "global_batch_size": world_size * batch_size,
        "step_ms": 1e3 * predicted.step_s,
        "exchange_ms": 1e3 * predicted.exchange_s,
        "exposed_exchange_ms": 1e3 * predicted.exposed_s,
        "samples_per_second": world_size * batch_size / predicted.step_s,
        "efficiency": compute.step_s / predicted.step_s,
    }


def compare(predicted: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> None:
    """Adds what was measured to what was predicted: `measured_step_ms`, and by how much of it the prediction is off."""
    measured = statistics.median(m["step_ms_median"] for m in rounds)
    predicted["measured_step_ms"] = measured
    predicted["error_percent"] = 100 * (predicted["step_ms"] - measured) / measured


def report(compute: Compute, link: Link, rows: Sequence[dict[str, Any]]) -> str:
    """What was measured, and the table."""
    columns = [
        ("devices", "num_devices", ""), ("batch", "global_batch_size", ""), ("step ms", "step_ms", ".2f"),
        ("exchange ms", "exchange_ms", ".2f"), ("not hidden ms", "exposed_exchange_ms", ".2f"),
        ("samples/s", "samples_per_second", ".0f"), ("efficiency", "efficiency", ".0%"),
        ("measured step ms", "measured_step_ms", ".2f"), ("error %", "error_percent", "+.1f"),
    ]  # fmt: skip
    shown = [column for column in columns if any(column[1] in row for row in rows)]
    cells = [[format(row[key], spec) if key in row else "-" for _, key, spec in shown] for row in rows]
    sizes = ", ".join(f"{size / 2**20:.2f}" for size in compute.bucket_bytes[:4])
    more = f" and {len(compute.bucket_bytes) - 4} more" if len(compute.bucket_bytes) > 4 else ""
    return "\n".join([
        f"One device: {1e3 * compute.step_s:.2f} ms a step, {1e3 * compute.last_backward_s:.2f} ms of it the last "
        f"backward. "
        f"Gradients: buckets of {sizes} MiB{more}.",
        f"Link: {link.bandwidth / 1e9:.2f} GB/s, {1e6 * link.latency_s:.1f} us a message.",
        table([name for name, _, _ in shown], cells),
    ])  # fmt: skip


def measured_link(flags: Flags, argv: Sequence[str], world: World) -> Link:
    """The link that the flags give; what they leave open is measured. Raises Failure if that fails."""
    tool: PredictFlags = flags.tool
    latency, bandwidth = tool.latency_us, tool.bandwidth_gb_s
    if latency is not None and bandwidth is not None:
        return Link(latency / 1e6, bandwidth * 1e9)
    with tempfile.TemporaryDirectory(prefix="lockstep-link-") as folder:
        result = Path(folder) / "link.json"
        status = launch(functools.partial(_measure_link, list(argv), result), world.num_devices)
        if status != 0:
            raise Failure(f"measuring the exchange ended with status {status}", status)
        small_s, large_s = json.loads(result.read_text())
    link = Link.measured(small_s, large_s, LARGE_BYTES, world.num_devices)
    if latency is not None:
        link = dataclasses.replace(link, latency_s=latency / 1e6)
    if bandwidth is not None:
        link = dataclasses.replace(link, bandwidth=bandwidth * 1e9)
    return link


def _measure_link(argv: list[str], result: Path, environment: RankEnvironment) -> int:
    flags, found = parse(for_several_devices(argv), True, PredictFlags)
    refuse(found)

    def work(parallel: Parallel) -> None:
        seconds = [latency_s(parallel), large_sum_s(parallel)]
        if parallel.is_main:
            result.write_text(json.dumps(seconds))

    return on_devices(flags, environment, work)
