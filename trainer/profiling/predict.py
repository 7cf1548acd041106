"""The speed to expect of more devices than there are here, under DistributedDataParallel.

A step of one device and an all-reduce between the devices of this machine are measured; bandwidth and latency can be
given instead, for example those of a network. docs/profiling.md says what the prediction assumes: above all devices
that do not disturb each other, and an exchange in a ring.

examples:
  python profiler.py predict --world-sizes 8,64,512
  python profiler.py predict --world-sizes 64 --bandwidth-gb-s 12 --latency-us 8
  python profiler.py predict --world-sizes 2,8 --device cpu --num-threads 1 --validate
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from trainer.commands.flags import Flags
from trainer.common import forms
from trainer.config import flag
from trainer.parallel.strategy import Strategy
from trainer.profiling.cost_model import Compute, Link, buckets, predict
from trainer.profiling.measure import MeasuringFlags, measure_run
from trainer.profiling.meters import LARGE_BYTES, small_and_large_sum_s
from trainer.profiling.phase_clock import BACKWARD
from trainer.profiling.processes import PROCESSES_ON_CPU, World, chosen_gpus, measure_in, warn_of_threads
from trainer.profiling.report import save_results, table


@dataclass
class PredictFlags(MeasuringFlags):
    """Predicting the speed of more devices"""

    world_sizes: tuple[int, ...] = flag((8, 64, 512), "numbers of devices, as 8,64,512", metavar="N", at_least=1)
    bandwidth_gb_s: float | None = flag(
        None, "10^9 bytes a second that a device sends (default: measured here)", above=0
    )
    latency_us: float | None = flag(
        None, "microseconds of one message between devices (default: measured here)", above=0
    )
    validate: bool = flag(False, "also measure as many devices as this machine has (2 processes on the CPU)")
    rounds: int = flag(3, "times that each measurement is started, in turns; medians count", at_least=1)


def problems(flags: Flags, argv: Sequence[str]) -> list[str]:
    """Flags that do not go with it, and measurements that need more devices than there are."""
    found, tool, size = [], flags.tool, flags.batch.global_batch_size
    if size is not None:
        reason = "each device is to have as many samples as one has here (--batch-size)"
        found.append(f"--global-batch-size {size}: leave it out; {reason}")
    if len(chosen_gpus(flags)) == 1:
        if tool.bandwidth_gb_s is None or tool.latency_us is None:
            found.append("--bandwidth-gb-s and --latency-us: give both; one GPU has no other to measure them with")
        if tool.validate:
            found.append("--validate: there is one GPU; leave it out")
    return found


def predict_scaling(flags: Flags, argv: Sequence[str]) -> None:
    """One command line. Raises UserError, and Failure when a measurement fails."""
    tool: PredictFlags = flags.tool
    warn_of_threads(flags)
    single, largest = World("single"), World(forms.USUAL, len(chosen_gpus(flags)) or PROCESSES_ON_CPU)
    link = measured_link(tool, argv, largest)
    worlds = [single, largest] if tool.validate else [single]
    rounds = [
        {world: measure_in(world, argv, PredictFlags, measure_run) for world in worlds} for _ in range(tool.rounds)
    ]
    compute = compute_of([measured[single] for measured in rounds], flags.batch.grad_accum_steps)
    sizes = {*tool.world_sizes, *(world.num_devices for world in worlds[1:])}
    rows = {size: predict(compute, link, size) for size in sorted(sizes)}
    if tool.validate:
        compare(rows[largest.num_devices], [measured[largest] for measured in rounds])
    print(report(compute, link, list(rows.values())))
    save_results(tool.json, {
        "command": "predict", "step_ms": 1e3 * compute.step_s, "last_backward_ms": 1e3 * compute.last_backward_s,
        "bucket_bytes": compute.bucket_bytes, "latency_us": 1e6 * link.latency_s,
        "bandwidth_gb_s": link.bandwidth / 1e9, "worlds": list(rows.values()),
    })  # fmt: skip


def measured_link(tool: PredictFlags, argv: Sequence[str], world: World) -> Link:
    """The link that the flags give; what they leave open is measured. Raises Failure if that fails."""
    flags = {"latency_s": (tool.latency_us, 1e-6), "bandwidth": (tool.bandwidth_gb_s, 1e9)}
    given = {name: value * unit for name, (value, unit) in flags.items() if value is not None}
    if len(given) == len(flags):
        return Link(**given)
    small_s, large_s = measure_in(world, argv, PredictFlags, _measure_sums)
    return replace(Link.measured(small_s, large_s, LARGE_BYTES, world.num_devices), **given)


def _measure_sums(flags: Flags, argv: Sequence[str], strategy: Strategy) -> list[float]:
    return small_and_large_sum_s(strategy.group)


def compute_of(rounds: Sequence[Mapping[str, Any]], grad_accum_steps: int) -> Compute:
    """From several measurements of one device, whose backward is that of all micro-batches of a step."""
    return Compute(
        step_s=median(m["step_ms_median"] for m in rounds) / 1e3,
        last_backward_s=median(m["phases"][BACKWARD]["ms_median"] for m in rounds) / grad_accum_steps / 1e3,
        bucket_bytes={phase: buckets(sizes) for phase, sizes in rounds[0]["gradient_bytes"].items()},
        batch_size=rounds[0]["global_batch_size"],
    )


def compare(predicted: dict[str, float], rounds: Sequence[Mapping[str, Any]]) -> None:
    """Adds what was measured to what was predicted: `measured_step_ms`, and by how much of it the prediction is off."""
    measured = median(m["step_ms_median"] for m in rounds)
    predicted["measured_step_ms"] = measured
    predicted["error_percent"] = 100 * (predicted["step_ms"] - measured) / measured


def report(compute: Compute, link: Link, rows: Sequence[Mapping[str, float]]) -> str:
    """What was measured, and the table."""
    columns = [
        ("devices", "num_devices", ""), ("batch", "global_batch_size", ""), ("step ms", "step_ms", ".2f"),
        ("exchange ms", "exchange_ms", ".2f"), ("not hidden ms", "exposed_exchange_ms", ".2f"),
        ("samples/s", "samples_per_second", ".0f"), ("efficiency", "efficiency", ".0%"),
        ("measured step ms", "measured_step_ms", ".2f"), ("error %", "error_percent", "+.1f"),
    ]  # fmt: skip
    gradients = "; ".join(f"{phase}, {_buckets(sizes)}" for phase, sizes in compute.bucket_bytes.items())
    return "\n".join([
        f"One device: {1e3 * compute.step_s:.2f} ms a step, {1e3 * compute.last_backward_s:.2f} ms of it the last "
        f"backward. Gradients: {gradients}.",
        f"Link: {link.bandwidth / 1e9:.2f} GB/s, {1e6 * link.latency_s:.1f} us a message.",
        table([column for column in columns if any(column[1] in row for row in rows)], rows),
    ])  # fmt: skip


def _buckets(sizes: Sequence[int]) -> str:
    more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
    return f"buckets of {', '.join(f'{size / 2**20:.2f}' for size in sizes[:4])} MiB{more}"
