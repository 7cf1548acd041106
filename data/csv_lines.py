"""Lines of CSV files as programs and people write them, with their numbers for messages."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from trainer.common.errors import UserError

DELIMITERS = (",", ";", "\t", "|")
BLANK = " "
"""Separates the fields of a line in which nothing else does; several ones count as one."""
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")

Line = tuple[int, list[str]]
"""The number of a line in its file, from 1, and its fields."""


def delimiter_of(line: str, delimiters: Sequence[str] = DELIMITERS) -> str:
    """The one that makes most columns of a line, and a blank where none makes two."""
    best = max(delimiters, key=lambda delimiter: _num_fields(line, delimiter))
    return BLANK if _num_fields(line, best) == 1 < len(line.split()) else best


def _num_fields(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:  # which `csv_lines` will tell, with the line
        return 0


def plain_name(name: str) -> str:
    """A name of a column without what does not matter: user_id:token -> user, CustomerID -> customer."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower().partition(":")[0])
    return letters if letters == "aid" else letters.removesuffix("id") or letters  # an article, in sessions


def utc_seconds(date: str) -> float:
    """Since 1970, of a date in a form of ISO 8601; one without a time zone is UTC. Raises ValueError for other text."""
    moment = datetime.fromisoformat(date)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def is_number(text: str) -> bool:
    """Whether `float` reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def without_point(text: str) -> str:
    """7 for 7.0, as programs write the whole numbers of a column with gaps; any other text as it is."""
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def in_order(names: Iterable[str]) -> list[str]:
    """The names, whole numbers by value if all are, else by text."""
    names = list(names)
    return sorted(names, key=_numeric_order if all(name.isascii() and name.isdigit() for name in names) else None)


def _numeric_order(digits: str) -> tuple[int, str, str]:
    # Not int(digits), which refuses numbers of thousands of digits.
    significant = digits.lstrip("0")
    return len(significant), significant, digits


def csv_lines(text: Iterable[str], delimiter: str, where: str) -> Iterator[Line]:
    """The lines that are not blank. Quotes, and spaces before a value, do not belong to it.

    where: the file as messages call it. Raises UserError.
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
        raise UserError(f"{where}, line {reader.line_num}: {error}; mend the line") from None


class CsvTable(NamedTuple):
    """line: on which the names of the columns end. header: the names; none of an empty file."""

    line: int
    header: list[str]
    lines: Iterator[Line]
    decimal_comma: bool
