"""Lines of CSV files as programs and people write them, numbered for messages."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from trainer.common.errors import UserError

DELIMITERS = (",", ";", "\t", "|")
BLANK = " "
"""Default separator of fields; repeated blanks count as one."""
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")

Line = tuple[int, list[str]]
"""Line number in its file, from 1, and fields."""


def delimiter_of(line: str, delimiters: Sequence[str] = DELIMITERS) -> str:
    """Returns the delimiter that splits a line into most columns; a blank if none splits it."""
    best = max(delimiters, key=lambda delimiter: _num_fields(line, delimiter))
    return BLANK if _num_fields(line, best) == 1 < len(line.split()) else best


def _num_fields(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:  # `csv_lines` will report it with the line
        return 0


def plain_name(name: str) -> str:
    """Reduces a column name to its essence: user_id:token -> user, CustomerID -> customer."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower().partition(":")[0])
    return letters if letters == "aid" else letters.removesuffix("id") or letters  # an article, in sessions


def utc_seconds(date: str) -> float:
    """Parses an ISO 8601 date to seconds since 1970; UTC without a time zone. Raises ValueError."""
    moment = datetime.fromisoformat(date)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def is_number(text: str) -> bool:
    """Returns whether `float` can parse a text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def without_point(text: str) -> str:
    """Removes the .0 that programs add to whole numbers in columns with gaps: 7.0 -> 7; keeps other text."""
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names: by value if all are whole numbers, else as text."""
    names = list(names)
    return sorted(names, key=_numeric_order if all(name.isascii() and name.isdigit() for name in names) else None)


def _numeric_order(digits: str) -> tuple[int, str, str]:
    # int(digits) would reject numbers of thousands of digits
    significant = digits.lstrip("0")
    return len(significant), significant, digits


def csv_lines(text: Iterable[str], delimiter: str, where: str) -> Iterator[Line]:
    """Yields the non-blank lines, without quotes and spaces before values.

    where: names the file in messages. Raises UserError.
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
            raise UserError(f"{where}, line {num_done + 1}: a quote is opened and never closed") from None
        raise UserError(f"{where}, line {reader.line_num}: {error}; fix the line") from None


class CsvTable(NamedTuple):
    """line: where the header ends. header: column names; empty for an empty file."""

    line: int
    header: list[str]
    lines: Iterator[Line]
    decimal_comma: bool
