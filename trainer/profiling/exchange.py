"""How fast processes exchange what they exchange in training: sums of tensors on their devices."""

import statistics

import torch

from trainer.parallel.base import Parallel
from trainer.profiling.timing import DeviceClock

SMALL_BYTES, SMALL_REPEATS = 4, 100
LARGE_BYTES, LARGE_REPEATS = 64 * 2**20, 5
WARM_UP = 3


def sums_are_right(parallel: Parallel) -> bool:
    """Whether a sum over processes of known numbers comes out exactly, on every one of them. All processes call it."""
    rank, world_size = parallel.shard
    numbers = torch.arange(10_000, dtype=torch.float32, device=parallel.device)
    expected = world_size * numbers + world_size * (world_size - 1) / 2
    values = numbers + rank
    parallel.sum_in_place(values)
    wrong = torch.tensor([float(not torch.equal(values, expected))], dtype=torch.float64)
    return float(parallel.sum(wrong)) == 0


def latency_s(parallel: Parallel) -> float:
    """Median seconds of a sum of 4 bytes."""
    return _seconds(parallel, SMALL_BYTES, SMALL_REPEATS)


def large_sum_s(parallel: Parallel) -> float:
    """Median seconds of a sum of 64 MiB."""
    return _seconds(parallel, LARGE_BYTES, LARGE_REPEATS)


def _seconds(parallel: Parallel, num_bytes: int, repeats: int) -> float:
    values = torch.zeros(num_bytes // 4, device=parallel.device)
    clock = DeviceClock(parallel.device)
    spans = []
    for _ in range(WARM_UP + repeats):
        start = clock.now()
        parallel.sum_in_place(values)
        spans.append((start, clock.now()))
    return statistics.median(clock.ms_between(*span) for span in spans[WARM_UP:]) / 1e3
