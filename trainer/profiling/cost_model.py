"""A model of how long a step takes on many devices, from what one device and one link do. Pure arithmetic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DistributedDataParallel's own: at this size a bucket of gradients is sent; the first is small, to begin early."""


@dataclass(frozen=True)
class Link:
    """Between neighbouring devices of a ring. latency_s: of one message; bandwidth: bytes per second one way."""

    latency_s: float
    bandwidth: float

    def all_reduce_s(self, num_bytes: float, world_size: int) -> float:
        """Seconds of a ring's all-reduce: 2 (n - 1) messages in a row, each of an n-th of the bytes."""
        return 2 * (world_size - 1) * (num_bytes / world_size / self.bandwidth + self.latency_s)

    @classmethod
    def measured(cls, small_s: float, large_s: float, large_bytes: int, world_size: int) -> "Link":
        """From the seconds of an all-reduce of next to nothing and of one of many bytes."""
        messages = 2 * (world_size - 1)
        transfer_s = max(large_s - small_s, 1e-9)
        return cls(small_s / messages, messages / world_size * large_bytes / transfer_s)


@dataclass(frozen=True)
class Compute:
    """A step of one device on its own, of `batch_size` samples.

    last_backward_s: of the last micro-batch, during which gradients are exchanged. bucket_bytes: of each phase's
    gradients, in the order in which they are sent.
    """

    step_s: float
    last_backward_s: float
    bucket_bytes: Mapping[str, Sequence[int]]
    batch_size: int


def predict(compute: Compute, link: Link, num_devices: int) -> dict[str, float]:
    """A step of so many devices, each with as many samples as the one; `exchange_ms` is hidden or exposed.

    All buckets but the last are exchanged while the last backward still runs; the last one is ready when it ends. Of
    several phases it is the mean: as many steps of each.
    """
    times = [[link.all_reduce_s(size, num_devices) for size in sizes] for sizes in compute.bucket_bytes.values()]
    exposed_s = fmean(max(0.0, sum(own[:-1]) - compute.last_backward_s) + sum(own[-1:]) for own in times)
    step_s = compute.step_s + exposed_s
    return {
        "num_devices": num_devices,
        "global_batch_size": num_devices * compute.batch_size,
        "step_ms": 1e3 * step_s,
        "exchange_ms": 1e3 * fmean(map(sum, times)),
        "exposed_exchange_ms": 1e3 * exposed_s,
        "samples_per_second": num_devices * compute.batch_size / step_s,
        "efficiency": compute.step_s / step_s,
    }


def buckets(gradient_bytes: Iterable[int]) -> list[int]:
    """The buckets of gradients given in the model's order: they are filled from the last to the first."""
    found, current, limit = [], 0, FIRST_BUCKET_BYTES
    for size in reversed(list(gradient_bytes)):
        current += size
        if current >= limit:
            found.append(current)
            current, limit = 0, BUCKET_BYTES
    return [*found, current] if current else found
