"""Lines of CSV files as programs and people write them, with their numbers for messages."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from typing import IO, NamedTuple

from trainer.common.errors import UserError
from trainer.common.files import lines_of

DELIMITERS = (",", ";", "\t")
_OTHER_FORMATS = {
    b"PAR1": "Parquet",
    b"PK\x03\x04": "Excel or a zip",
    b"\xd0\xcf\x11\xe0": "Excel",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"\x1f\x8b": "compressed, but not named .gz",
    b"BZh": "compressed by bzip2",
}
"""By the bytes that a file begins with."""
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")

Line = tuple[int, list[str]]
"""The number of a line in its file, from 1, and its fields."""


def delimiter_of(line: str, delimiters: Sequence[str] = DELIMITERS) -> str:
    """The one that makes most columns of a line."""
    return max(delimiters, key=lambda delimiter: _num_fields(line, delimiter))


def _num_fields(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:  # which `csv_lines` will tell, with the line
        return 0


def plain_name(name: str) -> str:
    """A name of a column without what does not matter: user_id:token -> user, CustomerID -> customer."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower().partition(":")[0])
    return letters.removesuffix("id") or letters


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


def first_line(text: Iterator[str], where: str) -> tuple[int, str]:
    """How many blank lines a file begins with, and the line below them, "" where there is none.

    where: the file as messages call it. Raises UserError for JSON.
    """
    num_blank, first = next(((i, line) for i, line in enumerate(text) if not line.isspace()), (0, ""))
    if first.lstrip().startswith(("{", "[{", "[[")) or first.strip() == "[":
        raise UserError(f"{where}: is JSON, which is not read; convert it to a CSV file with a line of names")
    return num_blank, first


def csv_lines(text: Iterable[str], delimiter: str, where: str, num_before: int = 0) -> Iterator[Line]:
    """The lines that are not blank. Quotes, and spaces before a value, do not belong to it.

    where: the file as messages call it. num_before: lines of the file before the text. Raises UserError.
    """
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    num_done = 0
    try:
        for fields in reader:
            num_done = reader.line_num
            if fields:
                yield num_before + num_done, fields
    except csv.Error as error:
        if str(error) == "unexpected end of data":
            raise UserError(f"{where}, line {num_before + num_done + 1}: a quote is opened and never closed") from None
        raise UserError(f"{where}, line {num_before + reader.line_num}: {error}; mend the line") from None


class CsvTable(NamedTuple):
    """line: on which the names of the columns end. header: the names; none of an empty file."""

    line: int
    header: list[str]
    lines: Iterator[Line]
    decimal_comma: bool


def csv_table(file: IO[str], where: str) -> CsvTable:
    """A file whose first line that is not blank names columns, which commas, semicolons or tabs separate.

    With semicolons the decimal point of a number may be a comma. where: the file as messages call it. Raises UserError.
    """
    text = lines_of(file)
    num_blank, first = first_line(text, where)
    delimiter = delimiter_of(first)
    lines = csv_lines(chain([first], text), delimiter, where, num_blank)
    line, names = next(lines, (0, []))
    return CsvTable(line, [name.strip() for name in names], lines, delimiter == ";")


@contextmanager
def reading_utf8(where: str, advice: str) -> Iterator[None]:
    """Makes a UserError of bytes that are no UTF-8. where: as the message calls the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        start = next((start for start in _OTHER_FORMATS if error.object.startswith(start)), None)
        if start is not None:
            raise UserError(f"{where}: is {_OTHER_FORMATS[start]}, which is not read; {advice}") from None
        byte = f"0x{error.object[error.start]:02x}"
        raise UserError(f"{where}: is not text in UTF-8, but has the byte {byte}; {advice}") from None
