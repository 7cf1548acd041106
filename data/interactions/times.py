"""Times of interactions: numbers, or dates in the forms of ISO 8601."""

from collections.abc import Sequence
from datetime import time

import numpy as np

from data.csv_lines import is_number, utc_seconds

_TIME_LIMIT = 2**62
"""Differences of smaller times fit into int64."""
_CALENDAR_S = (1e8, 4.1e9)
"""Unix times from 1973 to 2099."""
_UNITS = {"milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
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


def in_seconds(times: np.ndarray) -> tuple[np.ndarray, str]:
    """Seconds since 1970, of numbers that are no such seconds for certain, and what they were; else the same, and "".

    times: of a whole file, (n,) with n >= 1. Milli-, micro- or nanoseconds of the years from 1973 to 2099, or days of
    these years such as 20240531, or moments such as 20240531183000.
    """
    middle = np.median(times)  # a single time may be wrong, such as 0 where it was not known
    for unit, per_second in _UNITS.items():
        low, high = (per_second * limit for limit in _CALENDAR_S)
        if low <= middle < high:
            return _whole_if_all_are(times / per_second), unit
    if (seconds := _seconds_of_days(times)) is not None:
        return seconds, "days such as 20240531"
    if (seconds := _seconds_of_moments(times)) is not None:
        return seconds, "moments such as 20240531183000"
    return times, ""


def _seconds_of_moments(numbers: np.ndarray) -> np.ndarray | None:
    """None when one of them is no day with hours, minutes and seconds behind it."""
    days = _seconds_of_days(numbers // 1_000_000)
    hours, minutes, seconds = numbers // 10_000 % 100, numbers // 100 % 100, numbers % 100
    if days is None or not ((hours < 24) & (minutes < 60) & (seconds < 60)).all():
        return None
    return days + 3600 * hours + 60 * minutes + seconds


def _seconds_of_days(numbers: np.ndarray) -> np.ndarray | None:
    """None when one of them is no day, or they are of no year that is meant."""
    years, months, days = numbers // 10_000, numbers // 100 % 100, numbers % 100
    if numbers.dtype.kind != "i" or not ((years >= 1973) & (years <= 2099)).all():
        return None
    month = (12 * (years - 1970) + months - 1).astype("M8[M]")
    day = month.astype("M8[D]") + (days - 1)
    is_day = (months >= 1) & (months <= 12) & (day.astype("M8[M]") == month)
    return day.astype("M8[s]").astype(np.int64) if is_day.all() else None


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
    return _whole_if_all_are(np.fromiter(map(_seconds, texts), np.float64, len(texts)))


def _whole_if_all_are(seconds: np.ndarray) -> np.ndarray:
    whole = seconds.astype(np.int64)
    return whole if (whole == seconds).all() else seconds


def _seconds(text: str) -> float:
    text = text.strip()
    if is_number(text):  # such as 20240531, which stands among dates with hyphens
        raise ValueError(text)
    return utc_seconds(text.removesuffix(" UTC"))
