"""How long things take, on the device that does them, told by median and spread."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

Instant = float | torch.cuda.Event


class DeviceClock:
    """Takes the time of a device.

    On a GPU an instant is an event in the device's queue of work: taking it waits for nothing, and the time between two
    is what the device needed, not when the host asked. Elsewhere it is the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Instant:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms_between(self, start: Instant, end: Instant) -> float:
        """Milliseconds from one instant to a later one; waits until the later one has come."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


def spread(name: str, values_ms: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of some durations, as `{name}_ms_median`, `{name}_ms_p10`, `{name}_ms_p90`.

    Without a name as `ms_median` and so on.
    """
    p10, median, p90 = np.quantile(values_ms, [0.1, 0.5, 0.9]).tolist()
    prefix = f"{name}_" if name else ""
    return {f"{prefix}ms_median": median, f"{prefix}ms_p10": p10, f"{prefix}ms_p90": p90}


class Timer:
    """Collects durations by name: `with timer("forward"): ...`."""

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._spans: defaultdict[str, list[tuple[Instant, Instant]]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock.now()
        try:
            yield
        finally:
            self._spans[name].append((start, self._clock.now()))

    def milliseconds(self, name: str) -> list[float]:
        """Every duration of that name, in order. Waits for the device."""
        return [self._clock.ms_between(*span) for span in self._spans[name]]

    def results(self) -> dict[str, dict[str, float]]:
        """By name: `ms_median`, `ms_p10`, `ms_p90`, `ms_total` and `count`."""
        found = {}
        for name in list(self._spans):
            durations = self.milliseconds(name)
            found[name] = {**spread("", durations), "ms_total": sum(durations), "count": len(durations)}
        return found
