"""Reads lines of CSV files, with line numbers for messages, and interprets column names and cells."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from trainer.common.errors import UserError

DELIMITERS = (",", ";", "\t", "|")
BLANK = " "
"""Field separator of lines that contain none of DELIMITERS; consecutive blanks count as one separator."""
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")
_YEAR_FIRST = re.compile(r"(\d{4})([-/])(\d{1,2})\2(\d{1,2})(?:[T ](\d{1,2})(:.*))?", re.ASCII)

Line = tuple[int, list[str]]
"""Line number in the file, from 1, and the line's fields."""


def delimiter_of(line: str, delimiters: Sequence[str] = DELIMITERS) -> str:
    """Returns the delimiter that splits a line into the most columns, or BLANK if only blanks split it."""
    best = max(delimiters, key=lambda delimiter: _num_fields(line, delimiter))
    return BLANK if _num_fields(line, best) == 1 < len(line.split()) else best


def _num_fields(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:  # `csv_lines` reports the error with the line number
        return 0


def plain_name(name: str) -> str:
    """Normalises a column name for comparison: user_id:token -> user, CustomerID -> customer."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower().partition(":")[0])
    return letters if letters == "aid" else letters.removesuffix("id") or letters  # "aid" means article id


def utc_seconds(date: str) -> float:
    """Converts an ISO 8601 date, or one such as 2024/5/31 9:05, to Unix time; raises ValueError for other text.

    Dates without a time zone are interpreted as UTC.
    """
    if date_parts := _YEAR_FIRST.fullmatch(date):
        year, _, month, day, hour, rest = date_parts.groups()
        date = f"{year}-{month:0>2}-{day:0>2}T{hour or '':0>2}{rest or ':00'}"
    moment = datetime.fromisoformat(date)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def is_number(text: str) -> bool:
    """Returns whether `float` can parse a string."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def without_point(text: str) -> str:
    """Removes the decimals that programs add to whole numbers in columns with missing values: 7.0 -> 7."""
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def without_points(names: Sequence[str]) -> Sequence[str]:
    """Applies `without_point` to all names if this makes all of them whole numbers of at least 0."""
    whole = list(map(without_point, names))
    return whole if all(name.isascii() and name.isdigit() for name in whole) else names


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names: by value if all are whole numbers, otherwise as text."""
    names = list(names)
    return sorted(names, key=_numeric_order if all(name.isascii() and name.isdigit() for name in names) else None)


def _numeric_order(digits: str) -> tuple[int, str, str]:
    # int(digits) rejects numbers with thousands of digits
    significant = digits.lstrip("0")
    return len(significant), significant, digits


def csv_lines(text: Iterable[str], delimiter: str, where: str) -> Iterator[Line]:
    """Yields the fields of non-blank lines, without enclosing quotation marks and without spaces before values.

    where: the file's name in messages. Raises UserError for a malformed line.
    """
    text = map(str.strip, text) if delimiter == BLANK else text
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    num_done = 0
    try:
        for fields in reader:
            num_done = reader.line_num
            if fields:
                yield num_done, fields
    except csv.Error as error:
        if str(error) == "unexpected end of data":
            raise UserError(
                f"{where}, line {num_done + 1}: a quotation mark opens but never closes; close it or remove it"
            ) from None
        raise UserError(f"{where}, line {reader.line_num}: malformed CSV ({error}); fix the line") from None


class CsvTable(NamedTuple):
    """Table opened for reading. line: number of the header's last line. header: column names; [] for an empty file."""

    line: int
    header: list[str]
    lines: Iterator[Line]
    decimal_comma: bool
