"""Parses times in table cells: numbers, ISO 8601 dates, times of day, and dates with the day or month first."""

import re
from collections.abc import Sequence
from datetime import date
from functools import lru_cache

import numpy as np

from data.csv_lines import Line, is_number, utc_seconds

_DATE = re.compile(r"(\d{1,2})([./-])(\d{1,2})\2(\d{4})(?:[T ,]+(\S.*))?", re.ASCII)
_TIME = re.compile(r"(\d{1,2}):(\d\d)(?::(\d{1,2})(?:[.,:](\d{1,9}))?)?\s*([AaPp][Mm])?", re.ASCII)
_MOST_CHARACTERS = 64
"""Maximum length of a time in characters."""


def moments_of(lines: Sequence[Line], columns: Sequence[int], decimal_comma: bool) -> np.ndarray:
    """Converts cells to numbers, (lines, columns, 2) float64.

    Dates and times become seconds, and other text becomes NaN. A date such as 5/6/2024 has two values, with the day
    first and with the month first; `settled` chooses one of them. The two values of any other cell are equal.
    """
    found = [[moment_of(fields[column].strip(), decimal_comma) for column in columns] for _, fields in lines]
    return np.array(found, np.float64).reshape(len(lines), len(columns), 2)


def settled(moments: np.ndarray) -> np.ndarray:
    """Chooses whether the day or the month comes first in the dates of each column: (n, K, 2) -> (n, K) float64.

    The order with more valid dates is chosen. If both orders give the same number of valid dates but different time
    steps between rows, the column becomes NaN.
    """
    day_first, month_first = np.moveaxis(moments, 2, 0)
    is_better = np.isfinite(day_first).sum(axis=0) >= np.isfinite(month_first).sum(axis=0)
    clocks: np.ndarray = np.where(is_better, day_first, month_first)
    both = np.isfinite(day_first).sum(axis=0) == np.isfinite(month_first).sum(axis=0)
    steps = np.diff(day_first, axis=0), np.diff(month_first, axis=0)
    differs = ((steps[0] != steps[1]) & ~np.isnan(steps[0] + steps[1])).any(axis=0)
    clocks[:, both & differs] = np.nan
    return clocks


def moment_of(text: str, decimal_comma: bool = False) -> tuple[float, float]:
    """Converts one cell to two values, as `moments_of` does."""
    number = text.replace(",", ".") if decimal_comma else text
    if is_number(number):
        return float(number), float(number)
    if len(text) > _MOST_CHARACTERS:
        return np.nan, np.nan
    try:
        return (utc_seconds(text),) * 2
    except (ValueError, OverflowError):
        pass
    of_day = _seconds_of_day(text)
    return day_and_month(text) if np.isnan(of_day) else (of_day, of_day)


def day_and_month(text: str) -> tuple[float, float]:
    """Parses a date such as 5/6/2024 18:30 as two Unix times, day first and month first; NaN for an impossible date."""
    if (of_date := _DATE.fullmatch(text.strip()[:_MOST_CHARACTERS])) is None:
        return np.nan, np.nan
    of_day = _seconds_of_day(of_date[5] or "0:00")
    first, second, year = (int(of_date[group]) for group in (1, 3, 4))
    return _day(year, second, first) * 86400.0 + of_day, _day(year, first, second) * 86400.0 + of_day


def _seconds_of_day(text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        return np.nan
    hours, minutes, seconds, fraction, half = found.groups()
    if int(hours) > 24 or int(minutes) > 59 or int(seconds or 0) > 60:
        return np.nan
    if half:
        hours = int(hours) % 12 + 12 * (half in ("PM", "pm", "Pm", "pM"))
    return int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds or 0}.{fraction or 0}")


@lru_cache(maxsize=1024)
def _day(year: int, month: int, day: int) -> float:
    try:
        return date(year, month, day).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        return np.nan
