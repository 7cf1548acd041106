"""Interprets clocks of recordings: columns with the times of rows, as dates or as numbers in an unknown unit."""

from collections.abc import Sequence

import numpy as np

from data.csv_lines import plain_name

_CLOCKS = ("t", "ts", "utc", "unix", "clock")
_OF_CLOCKS = ("time", "date", "second", "elapsed", "epoch", "millis", "nanos")
"""Usual names of columns with times, and words that occur in such names."""
GAP = 10
"""A clock step larger than this multiple of the clock's median step is a gap between recordings."""
_UNITS = (1, 1e3, 1e6, 1e9)
"""Possible numbers of clock units per second."""
_SLOWEST_HZ = 3.0
"""Lowest plausible sample rate; the highest is a thousand times higher, so at most one of `_UNITS` fits."""
_SAME_RATE = (0.8, 1.25)
"""Limits of the ratio of two rates that count as equal."""


def is_clock(name: str) -> bool:
    """Returns whether a column's name suggests that it contains times."""
    plain = plain_name(name)
    return plain in _CLOCKS or any(part in plain for part in _OF_CLOCKS)


def num_disorders(clocks: np.ndarray) -> int:
    """Counts how often each clock, (n, K), steps back but stays above its first value; returns the smallest count."""
    goes_back = (clocks[1:] < clocks[:-1]) & (clocks[1:] > clocks[0])
    return int(goes_back.sum(axis=0).min(initial=len(clocks))) if clocks.shape[1] else 0


def are_out_of_order(steps: np.ndarray) -> bool:
    """Returns whether every clock falls at least half as often as it rises, which suggests shuffled or reversed rows.

    steps: (n, K), steps of the clocks from row to row.
    """
    rises, falls = (steps > 0).sum(axis=0), (steps < 0).sum(axis=0)
    return bool(falls.any() and (2 * falls >= rises).all())


def rate_and_gaps(clocks: np.ndarray, in_seconds: np.ndarray) -> tuple[float | None, np.ndarray]:
    """Returns rows per second, and indices (int64) of rows that follow a gap, both measured by the finest clock.

    clocks: (n, K); the finest one rises most often. in_seconds: (K,) bool, whether clocks are in seconds. The rate is
    None if no clock rises twice, if the finest clock counts rows, or if no unit gives a plausible rate.
    """
    found: list[tuple[int, float | None, np.ndarray]] = [(0, None, np.empty(0, np.int64))]
    for steps, is_in_seconds in zip(np.diff(clocks, axis=0).T, in_seconds, strict=True):
        rising = steps[steps > 0]
        if len(rising):
            is_gap = steps > GAP * np.median(rising)
            # a coarse clock, constant over several rows, is measured from its first to its last rise
            rises = np.flatnonzero((steps > 0) & ~is_gap)
            counts = (steps >= 0) & ~is_gap
            counts[: rises[0] + 1] = counts[rises[-1] + 1 :] = False
            rate_hz = _rate_hz(float(steps[counts].mean()), bool(is_in_seconds)) if counts.any() else None
            found.append((len(rising), rate_hz, np.flatnonzero(is_gap) + 1))
    _, rate_of_finest, gaps = max(found, key=lambda one: (one[0], -len(one[2])))
    return rate_of_finest, gaps


def _rate_hz(step: float, is_in_seconds: bool) -> float | None:
    """Converts a clock's step per row to rows per second; returns None if the unit is unknown."""
    if is_in_seconds:
        return 1 / step
    rates = (unit / step for unit in _UNITS)
    return None if step == 1 else next((rate for rate in rates if _SLOWEST_HZ <= rate < 1e3 * _SLOWEST_HZ), None)


def is_same_rate(one_hz: float, other_hz: float) -> bool:
    """Returns whether the ratio of two rates is between 0.8 and 1.25."""
    lowest, highest = _SAME_RATE
    return lowest < one_hz / other_hz < highest


def usual_rate_hz(told_hz: float) -> float:
    """Rounds a measured rate to a whole number if one is within 0.5 %, otherwise to three digits: 99.97 -> 100."""
    whole = round(told_hz)
    return float(whole) if abs(told_hz - whole) < 0.005 * whole else float(f"{told_hz:.3g}")


def middle_rate_hz(rates: Sequence[tuple[float, int]]) -> float | None:
    """Returns the weighted lower median of pairs (rate in Hz, weight); None for no pairs."""
    half, seen = sum(count for _, count in rates) / 2, 0
    for rate_hz, count in sorted(rates):
        seen += count
        if seen >= half:
            return rate_hz
    return None


def seconds_of(clocks: np.ndarray, in_seconds: np.ndarray) -> np.ndarray | None:
    """Returns seconds since the first row, (n,) float64, from the first usable clock; None if no clock is usable.

    A usable clock never falls, rises in more than 90 % of the rows, and has a known unit.
    """
    for clock, is_in_seconds in zip(clocks.T, in_seconds, strict=True):
        steps = np.diff(clock)
        rising = steps[steps > 0]
        if not np.isfinite(clock).all() or steps.min(initial=0) < 0 or len(rising) <= 0.9 * len(steps):
            continue
        rate_hz = _rate_hz(float(np.median(rising)), bool(is_in_seconds))
        if rate_hz is not None:
            seconds: np.ndarray = (clock - clock[0]) / (np.median(rising) * rate_hz)
            return seconds
    return None
