"""Times of interactions: numbers, or dates in the forms of ISO 8601."""

from collections.abc import Sequence
from datetime import UTC, datetime, time

import numpy as np

from data.csv_lines import is_number

_TIME_LIMIT = 2**62
"""Differences of smaller times fit into int64."""
_CALENDAR_S = (1e8, 4.1e9)
"""Unix times from 1973 to 2099."""
EXPECTED = "a time: a number, or a date such as 2024-05-31 or 2024-05-31T18:30:00+02:00"


def parse_times(texts: Sequence[str]) -> np.ndarray | None:
    """(n,) int64, or float64 where not all are whole numbers; None when one is no time, or numbers meet dates.

    Dates become seconds since 1970; those without a time zone are read as UTC.
    """
    for read in (_whole_numbers, _numbers, _dates):
        try:
            times = read(texts)
        except (ValueError, OverflowError):
            continue
        usable = (times > -_TIME_LIMIT) & (times < _TIME_LIMIT)  # false for NaN
        return times if usable.all() else None
    return None


def is_time(text: str) -> bool:
    """Whether it can be a time."""
    return parse_times([text]) is not None


def is_calendar_time(text: str) -> bool:
    """Whether it can be nothing but a time: a date, or seconds or milliseconds since 1970 between 1973 and 2099."""
    if not is_number(text):
        return is_time(text)
    low, high = _CALENDAR_S
    number = float(text)
    return low <= number < high or 1e3 * low <= number < 1e3 * high


def is_time_of_day(text: str) -> bool:
    """Whether it is one such as 18:30:00, without the date."""
    try:
        time.fromisoformat(text)
    except ValueError:
        return False
    return ":" in text


def _whole_numbers(texts: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(int, texts), np.int64, len(texts))


def _numbers(texts: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(float, texts), np.float64, len(texts))


def _dates(texts: Sequence[str]) -> np.ndarray:
    seconds = np.fromiter(map(_seconds, texts), np.float64, len(texts))
    whole = seconds.astype(np.int64)
    return whole if (whole == seconds).all() else seconds


def _seconds(text: str) -> float:
    text = text.strip()
    moment = datetime.fromisoformat(text.removesuffix(" UTC"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
