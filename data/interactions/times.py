"""Parses times of interactions: numbers, ISO 8601 dates, and dates with the day or the month first."""

from collections.abc import Sequence
from datetime import UTC, datetime, time

import numpy as np

from data.csv_lines import is_number, utc_seconds
from data.moments import day_and_month, settled

_TIME_LIMIT = 2**62
"""Limit of the absolute values of times, so that differences fit int64."""
_CALENDAR_S = (1e8, 4.1e9)
"""Limits of Unix times, in seconds, from 1973 to 2099."""
_UNITS = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
EXPECTED = "a time: a number, or a date such as 2024-05-31, 2024-05-31T18:30:00+02:00 or 31/05/2024 18:30"


def parse_times(texts: Sequence[str]) -> np.ndarray | None:
    """Parses times to (n,) int64 if all are whole, else float64; returns None if one is invalid or formats differ.

    Dates become seconds since 1970; dates without a time zone are in UTC. For dates such as 31/05/2024, the result is
    (n, 2) float64, with the day first in column 0 and the month first in column 1; NaN marks an impossible date.
    """
    for read in (_whole_numbers, _numbers, _dates, _days_and_months):
        try:
            times = read(texts)
        except (ValueError, OverflowError):
            continue
        usable = (times > -_TIME_LIMIT) & (times < _TIME_LIMIT)  # False for NaN
        return times if (usable if times.ndim == 1 else usable.any(axis=1)).all() else None
    return None


def in_seconds(times: np.ndarray) -> tuple[np.ndarray, str]:
    """Converts times to seconds since 1970; also returns the detected unit or date format, "" for seconds.

    times: all times of a file from `parse_times`, (n,) with n >= 1, or (n, 2) for ambiguous dates. Detects milli-,
    micro- and nanoseconds of the years 1973 to 2099, and days of these years as numbers such as 20240531, optionally
    with hours, minutes and seconds. In files with such days, zero and negative numbers mark unknown times
    and become 0. Raises ValueError if it is unclear whether the day or the month comes first, if most numbers are such
    days but one is not, or if the times have different units.
    """
    if times.ndim == 2:
        found = settled(times[:, None])[:, 0]
        if np.isnan(found).any():
            raise ValueError("it is unclear whether the day or the month comes first; write dates as 2024-05-31")
        return _whole_if_all_are(found), f"dates whose {'day' if (found == times[:, 0]).all() else 'month'} comes first"
    is_known = times > 0
    known = times[is_known]
    for form, read in _DATES_IN_DIGITS.items():
        seconds, is_valid = read(known)
        if len(known) and is_valid.all():
            all_seconds = np.zeros(len(times), np.int64)
            all_seconds[is_known] = seconds
            return all_seconds, form
        if is_valid.sum() > len(known) / 2:
            wrong = known[is_valid.argmin()]
            raise ValueError(f"most times are {form}, but {wrong:.17g} is not; correct it or remove the line")
    middle = np.median(times)  # the median, since single times may be wrong
    unit = next((unit for unit, scale in _UNITS.items() if _in_calendar(middle / scale)), None)
    if unit is None:
        return times, ""
    is_in = {other: _in_calendar(times / scale) for other, scale in _UNITS.items()}
    if other := next((other for other in _UNITS if other != unit and is_in[other].any()), None):
        one, two = times[is_in[unit].argmax()], times[is_in[other].argmax()]
        raise ValueError(f"{one:.17g} looks like {unit}, but {two:.17g} like {other}; use one unit for all times")
    return (times, "") if unit == "seconds" else (_whole_if_all_are(times / _UNITS[unit]), unit)


def _in_calendar(seconds: np.ndarray) -> np.ndarray:
    low, high = _CALENDAR_S
    return (low <= seconds) & (seconds < high)


def _seconds_of_moments(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Converts numbers such as 20240531183000 to seconds since 1970; also returns which numbers are such times."""
    minutes, are_minutes = _seconds_of_minutes(numbers // 100)
    seconds = numbers % 100
    return minutes + seconds, are_minutes & (seconds <= 59)


def _seconds_of_minutes(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Converts numbers such as 202405311830 to seconds since 1970; also returns which numbers are such times."""
    days, are_days = _seconds_of_days(numbers // 10_000)
    hours, minutes = numbers // 100 % 100, numbers % 100
    return days + 3600 * hours + 60 * minutes, are_days & (hours <= 23) & (minutes <= 59)


def _seconds_of_days(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Converts days such as 20240531 to seconds since 1970; also returns which numbers are days of 1973 to 2099."""
    is_day = (numbers % 1 == 0) & (numbers >= 1973_00_00) & (numbers <= 2099_99_99)
    whole = np.where(is_day, numbers, 1973_01_01).astype(np.int64)
    years, months, days = whole // 10_000, whole // 100 % 100, whole % 100
    month = (12 * (years - 1970) + months - 1).astype("M8[M]")
    day = month.astype("M8[D]") + (days - 1)
    is_day &= (months >= 1) & (months <= 12) & (day.astype("M8[M]") == month)
    return day.astype("M8[s]").astype(np.int64), is_day


_DATES_IN_DIGITS = {
    "days such as 20240531": _seconds_of_days,
    "moments such as 202405311830": _seconds_of_minutes,
    "moments such as 20240531183000": _seconds_of_moments,
}


def form_of(text: str) -> str:
    """Describes the format of a time, so that formats can be compared; returns "" for other strings."""
    if is_number(text):
        return "a number"
    times = parse_times([text])
    return "" if times is None else "an ISO date" if times.ndim == 1 else "a date with day and month"


def is_time(text: str) -> bool:
    """Returns whether a string is a number or a date."""
    return parse_times([text]) is not None


def is_calendar_time(text: str) -> bool:
    """Returns whether a string is a date, or a Unix time from 1973 to 2099 in seconds or milliseconds."""
    if not is_number(text):
        return is_time(text)
    number = np.array(float(text))
    return bool(_in_calendar(number) or _in_calendar(number / _UNITS["milliseconds"]))


def is_time_of_day(text: str) -> bool:
    """Returns whether a string is a time of day such as 18:30:00, without a date."""
    try:
        time.fromisoformat(text)
    except ValueError:
        return False
    return ":" in text


def time_range(times: np.ndarray) -> str:
    """Formats the first and the last of times (n,), n >= 1, as dates if possible."""
    known = times[times != 0]  # 0 marks an unknown time
    if not len(known) or not _in_calendar(known).all():
        return f"numbers from {times.min():,} to {times.max():,}"
    first, last = (datetime.fromtimestamp(float(time), UTC).strftime("%Y-%m-%d") for time in (known.min(), known.max()))
    return f"{first} to {last}"


def _whole_numbers(texts: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(int, texts), np.int64, len(texts))


def _numbers(texts: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(float, texts), np.float64, len(texts))


def _dates(texts: Sequence[str]) -> np.ndarray:
    return _whole_if_all_are(np.fromiter(map(_seconds, texts), np.float64, len(texts)))


def _days_and_months(texts: Sequence[str]) -> np.ndarray:
    return np.array(list(map(day_and_month, texts)), np.float64).reshape(-1, 2)


def _whole_if_all_are(seconds: np.ndarray) -> np.ndarray:
    whole = seconds.astype(np.int64)
    return whole if (whole == seconds).all() else seconds


def _seconds(text: str) -> float:
    text = text.strip()
    if is_number(text):  # fromisoformat would also accept 20240531
        raise ValueError(text)
    return utc_seconds(text.removesuffix(" UTC"))
