"""Tables of strings and numbers in memory."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from data.moments import moment_of
from data.tabular.spelling import (
    MISSING,
    NEARLY_ALL,
    PLAIN,
    UNKNOWN,
    Likely,
    Reading,
    Spelling,
    canonical,
    reading_of,
    spelling_like,
)
from trainer.common.errors import UserError

LARGEST_NUMBER = 1e100
"""Largest accepted absolute value; larger numbers count as missing, because sums of their squares may overflow."""
_DATE = re.compile(
    r"(\d{4}-\d{1,2}-\d{1,2}|\d{4}/\d{1,2}/\d{1,2}|\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2}))"
    r"([ T]\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?(Z| ?[+-]\d{2}:?\d{2})?)?"
)

_PARTS_OF_DATE: dict[str, Callable[[float], float]] = {
    "days": lambda seconds: seconds / 86400,
    "month": lambda seconds: float((np.datetime64(0, "s") + int(seconds)).astype("M8[M]").astype(int) % 12 + 1)
    if np.isfinite(seconds) else np.nan,
    "weekday": lambda seconds: (seconds // 86400 + 3) % 7,
    "hour": lambda seconds: seconds % 86400 / 3600,
}  # fmt: skip
"""Functions from seconds since 1970 to features of a date; weekday is 0 for Monday."""


@dataclass(frozen=True)
class Column:
    """Column of a table with n rows.

    values: (n,) float64, numbers or indices into texts, NaN where missing.
    texts: distinct strings, sorted, some of which may occur in no row; None for numbers.
    spelling: format of the strings from which numbers were converted. likely: decimal separator to assume if the
        strings do not show it.
    """

    name: str
    values: np.ndarray
    texts: tuple[str, ...] | None = None
    spelling: Spelling = PLAIN
    likely: Likely = UNKNOWN

    @classmethod
    def of_codes(cls, name: str, codes: np.ndarray, texts: Iterable[str]) -> "Column":
        """Builds a column from `texts`, which may contain duplicates, and integer indices (n,) of these."""
        stripped = [text.strip() for text in texts]
        present = tuple(sorted(set(stripped) - MISSING))
        place = {text: float(i) for i, text in enumerate(present)}
        return cls(name, np.array([place.get(text, np.nan) for text in stripped])[codes], present)

    @classmethod
    def of_values(cls, name: str, values: np.ndarray) -> "Column":
        """Builds a column from an array of shape (n,); the elements of a non-numeric array become strings.

        Booleans become "True" and "False", whether the array's dtype is bool or object.
        """
        if values.dtype.kind in "fiu":
            return cls(name, values.astype(np.float64))
        if values.dtype.kind == "M":  # tolist() converts times in nanoseconds to plain integers
            values = values.astype(str)
        texts = [_text(value) for value in values.tolist()]
        present, codes = np.unique(np.array(texts, dtype=str), return_inverse=True)
        return cls.of_codes(name, codes, present.tolist())

    @property
    def is_missing(self) -> np.ndarray:
        """Returns whether each row's value is missing, (n,) bool."""
        return np.isnan(self.values)

    @cached_property
    def distinct(self) -> np.ndarray:
        """Returns the distinct values in ascending order, without missing values."""
        return np.unique(self.values[~self.is_missing])

    @property
    def distinct_texts(self) -> list[str]:
        """Returns the distinct values as strings, with whole numbers written as 3, not 3.0."""
        if self.texts is None:
            return [number_text(value) for value in self.distinct.tolist()]
        return [self.texts[int(code)] for code in self.distinct]

    @cached_property
    def counts(self) -> np.ndarray:
        """Returns the number of rows of each distinct value."""
        return np.unique(self.values[~self.is_missing], return_counts=True)[1]

    def take(self, rows: np.ndarray) -> "Column":
        """Selects rows by positions (k,) or by a boolean mask (n,)."""
        return replace(self, values=self.values[rows])

    def looked_up(self, of_text: Callable[[str], float]) -> np.ndarray:
        """Applies of_text to each row's string: (n,) float64, NaN where missing."""
        return np.array([*map(of_text, self.distinct_texts), np.nan], np.float64)[self.places]

    @property
    def places(self) -> np.ndarray:
        """Returns the index of each row's value in `distinct`, (n,) int64, or len(distinct) where missing."""
        return np.where(self.is_missing, len(self.distinct), np.searchsorted(self.distinct, self.values))

    @cached_property
    def reading(self) -> Reading:
        """Decides whether the column is numeric, and detects its number format."""
        if self.texts is None:
            return Reading(self.spelling)
        return reading_of(self.distinct_texts, self.counts, self.likely)

    def as_numbers(self, spelling: Spelling = PLAIN) -> np.ndarray:
        """Parses the rows as numbers, (n,) float64; other strings, and numbers beyond LARGEST_NUMBER, become NaN."""
        values = self.values if self.texts is None else self.looked_up(spelling.number)
        return np.where(np.abs(values) <= LARGEST_NUMBER, values, np.nan)  # the comparison is False for NaN

    def spelling_like(self, trained: Spelling) -> Spelling:
        """Detects the number format of new rows of a column, whose format in training was `trained`."""
        if self.texts is None:
            return PLAIN
        return spelling_like(trained, self.distinct_texts, self.counts, self.likely)

    def typed(self) -> "Column":
        """Converts strings to numbers if nearly all strings are numbers, and otherwise merges equivalent categories."""
        spelling = self.reading.spelling
        if spelling is not None:
            return Column(self.name, self.as_numbers(spelling), None, spelling)
        return self.with_one_text_a_category()

    def with_one_text_a_category(self) -> "Column":
        """Merges equivalent spellings of a category, such as 1 and 1.0."""
        texts = [*canonical(self.distinct_texts, self.counts), ""]
        return Column.of_codes(self.name, self.places, texts)

    def is_date(self) -> bool:
        """Returns whether nearly all values are dates such as 2024-05-31, 31.5.2024 or 2024-05-31T12:30:00Z."""
        if self.texts is None:
            return False
        are_dates = [_DATE.fullmatch(text) is not None for text in self.distinct_texts]
        return any(are_dates) and bool(self.counts[are_dates].sum() >= NEARLY_ALL * self.counts.sum())

    def date_parts(self) -> list["Column"]:
        """Converts dates to numeric features; returns an empty list if the order of day and month is ambiguous."""
        order = self.date_order
        parts = [] if order is None else _PARTS_OF_DATE
        return [self.date_part(f"{part}, {order}" if order else part) for part in parts]

    @cached_property
    def dates(self) -> dict[str, np.ndarray]:
        """Returns the distinct strings as seconds since 1970, (k,) float64, by order: "day first", "month first" or "".

        Strings that are not dates in this order become NaN. For "", only dates that are equal in both orders are valid.
        """
        read = [moment_of(text) if _DATE.fullmatch(text) else (np.nan, np.nan) for text in self.distinct_texts]
        day_first, month_first = np.array(read, np.float64).reshape(-1, 2).T
        either = np.where(day_first == month_first, day_first, np.nan)
        return {"": either, "day first": day_first, "month first": month_first}

    @property
    def date_order(self) -> str | None:
        """Returns the key of `dates` with the most valid dates, "" in a tie; None if day and month are ambiguous."""
        num_valid = {order: int(np.isfinite(seconds).sum()) for order, seconds in self.dates.items()}
        order = max(num_valid, key=num_valid.__getitem__)
        return None if order and num_valid["day first"] == num_valid["month first"] else order

    def date_part(self, part: str) -> "Column":
        """Computes a feature of dates. part: a key of `_PARTS_OF_DATE`, optionally with an order: "days, day first"."""
        kind, _, order = part.partition(", ")
        values = np.array([*map(_PARTS_OF_DATE[kind], self.dates[order]), np.nan])
        return Column(f"{self.name} ({part})", values[self.places])


@dataclass(frozen=True)
class Table:
    """Columns of equal length with distinct names.

    where: name of the table in messages. notes: sentences for the user on how the table was read.
    """

    where: str
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        twice = {name for name in self.names if self.names.count(name) > 1}
        if twice:
            raise UserError(f"{self.where}: more than one column is named {sorted(twice)[0]!r}; rename all but one")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def num_rows(self) -> int:
        return len(self.columns[0].values)

    def column(self, name: str) -> Column | None:
        """Returns the column or date feature with this name; None if neither exists.

        Raises UserError if the feature and the table's dates clearly have day and month in different orders.
        """
        source = self.source(name)
        if source is None or source.name == name:
            return source
        part = name.removeprefix(f"{source.name} (").removesuffix(")")
        order, found = part.partition(", ")[2], source.date_order
        if order and found and order != found:
            is_odd = np.isfinite(source.dates[found]) & np.isnan(source.dates[order])
            raise UserError(
                f"{self.where}: {source.name}: {source.distinct_texts[is_odd.argmax()]!r} has the {found}, but the "
                f"dates of the training rows have the {order}; write dates as 2024-05-31"
            )
        return source.date_part(part)

    def source(self, name: str) -> Column | None:
        """Returns the column with this name, or the column from which the date feature with this name is derived."""
        base, _, part = name.rpartition(" (")
        is_part = part.partition(",")[0].strip(")") in _PARTS_OF_DATE
        for column in self.columns:
            if column.name == name or (column.name == base and column.texts is not None and is_part):
                return column
        return None

    def without(self, names: Iterable[str]) -> "Table":
        names = set(names)
        return replace(self, columns=tuple(column for column in self.columns if column.name not in names))

    def take(self, rows: np.ndarray) -> "Table":
        return replace(self, columns=tuple(column.take(rows) for column in self.columns))


def table_of_array(values: np.ndarray, names: Sequence[str], where: str) -> Table:
    """Builds a table from values of shape (n, m) and any type, with one name per column."""
    return Table(where, tuple(Column.of_values(name, values[:, i]) for i, name in enumerate(names)))


def number_text(value: float) -> str:
    """Formats 3.0 as 3, and other numbers as the shortest string from which `float` restores the number."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _text(value: object) -> str:
    """Formats an element of an array as a string; 1 and 1.0 give equal strings."""
    if isinstance(value, float):
        return number_text(float(value))
    return "" if value is None else str(value)
