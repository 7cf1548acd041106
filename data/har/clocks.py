"""Clocks of recordings: when each row was measured, by dates, or by numbers in units that nobody names."""

from collections.abc import Sequence

import numpy as np

from data.csv_lines import Line, is_number, plain_name, utc_seconds

_CLOCKS = ("t", "ts", "utc", "unix", "clock")
_OF_CLOCKS = ("time", "date", "second", "elapsed", "epoch", "millis", "nanos")
"""What clocks are called; of the last, names that hold such a word. They tell the activity by when it was recorded."""
GAP = 10
"""Of the usual step of a clock: a longer one is a gap between recordings."""
_UNITS = (1, 1e3, 1e6, 1e9)
"""Of a second."""
_SLOWEST_HZ = 3.0
"""Of recordings: of the units of a clock one alone gives a rate between this and a thousand times as much."""


def is_clock(name: str) -> bool:
    """By the name of a column."""
    plain = plain_name(name)
    return plain in _CLOCKS or any(part in plain for part in _OF_CLOCKS)


def clocks_of(lines: Sequence[Line], columns: Sequence[int], decimal_comma: bool) -> np.ndarray:
    """(lines, columns) float64: numbers, or dates in the forms of ISO 8601 as seconds; NaN for what is neither."""
    texts = [[fields[column] for column in columns] for _, fields in lines]
    if decimal_comma:
        texts = [[text.replace(",", ".") for text in row] for row in texts]
    values = [[float(text) if is_number(text) else _seconds(text) for text in row] for row in texts]
    return np.array(values).reshape(len(lines), len(columns))


def _seconds(text: str) -> float:
    try:
        return utc_seconds(text.strip())
    except ValueError:
        return np.nan


def num_disorders(clocks: np.ndarray) -> int:
    """How often the steadiest of the clocks of a recording goes back, (n, K), but not to a new start."""
    goes_back = (clocks[1:] < clocks[:-1]) & (clocks[1:] > clocks[0])
    return int(goes_back.sum(axis=0).min(initial=len(clocks))) if clocks.shape[1] else 0


def step_and_gaps(clocks: np.ndarray) -> tuple[float | None, np.ndarray]:
    """By how much the finest clock of a recording, (n, K), rises a row, and the rows, int64, before which it jumps.

    None, and no rows, where no clock rises.
    """
    found: list[tuple[int, float | None, np.ndarray]] = [(0, None, np.empty(0, np.int64))]
    for steps in np.diff(clocks, axis=0).T:
        rising = steps[steps > 0]
        if len(rising):
            is_gap = steps > GAP * np.median(rising)
            # A clock that is coarser than the rows stands still in between: it is read from its first rise to its last.
            rises = np.flatnonzero((steps > 0) & ~is_gap)
            counts = (steps >= 0) & ~is_gap
            if len(rises) > 1:
                counts[: rises[0] + 1] = counts[rises[-1] + 1 :] = False
            found.append((len(rising), float(steps[counts].mean()), np.flatnonzero(is_gap) + 1))
    _, step_of_finest, gaps = max(found, key=lambda one: (one[0], -len(one[2])))
    return step_of_finest, gaps


def told_rate_hz(step: float) -> float | None:
    """Rows a second, by a clock that rises by so much a row; None where it counts rows, or no unit gives a rate."""
    rates = (unit / step for unit in _UNITS)
    return None if step == 1 else next((rate for rate in rates if _SLOWEST_HZ <= rate < 1e3 * _SLOWEST_HZ), None)
