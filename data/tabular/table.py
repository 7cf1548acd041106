"""A table in memory: columns of texts or of numbers, with what is missing."""

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
"""Numbers beyond, and infinite ones, count as missing: their squares have no sum in float64."""
_LONGEST_DATE = 64
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
"""What is learned from dates, of seconds since 1970; the week begins with Monday, 0."""


@dataclass(frozen=True)
class Column:
    """A column of n rows.

    values: (n,) float64, NaN where there is none; the numbers, or where there are texts their places among them.
    texts: distinct, in order; not all need to occur. None for numbers.
    spelling: of texts that became numbers. likely: of texts, how they are written where they do not show it.
    """

    name: str
    values: np.ndarray
    texts: tuple[str, ...] | None = None
    spelling: Spelling = PLAIN
    likely: Likely = UNKNOWN

    @classmethod
    def of_codes(cls, name: str, codes: np.ndarray, texts: Iterable[str]) -> "Column":
        """From the place of each row's text, (n,) integers, in any list of texts; equal ones may be there twice."""
        stripped = [text.strip() for text in texts]
        present = tuple(sorted(set(stripped) - MISSING))
        place = {text: float(i) for i, text in enumerate(present)}
        return cls(name, np.array([place.get(text, np.nan) for text in stripped])[codes], present)

    @classmethod
    def of_values(cls, name: str, values: np.ndarray) -> "Column":
        """From an array (n,) of numbers, or of anything else, of which the texts are taken.

        So booleans are the same in an array of their own and among objects, where gaps put them.
        """
        if values.dtype.kind in "fiu":
            return cls(name, values.astype(np.float64))
        if values.dtype.kind == "M":  # Python would make plain numbers of times in nanoseconds
            values = values.astype(str)
        texts = [_text(value) for value in values.tolist()]
        present, codes = np.unique(np.array(texts, dtype=str), return_inverse=True)
        return cls.of_codes(name, codes, present.tolist())

    @property
    def is_missing(self) -> np.ndarray:
        """(n,) bool."""
        return np.isnan(self.values)

    @cached_property
    def distinct(self) -> np.ndarray:
        """The different values, ascending, none of them missing."""
        return np.unique(self.values[~self.is_missing])

    @property
    def distinct_texts(self) -> list[str]:
        """The different values as texts; whole numbers as 3, not 3.0."""
        if self.texts is None:
            return [number_text(value) for value in self.distinct.tolist()]
        return [self.texts[int(code)] for code in self.distinct]

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each of the different values."""
        return np.unique(self.values[~self.is_missing], return_counts=True)[1]

    def take(self, rows: np.ndarray) -> "Column":
        """Some of the rows: (k,) their places, or (n,) bool."""
        return replace(self, values=self.values[rows])

    def looked_up(self, of_text: Callable[[str], float]) -> np.ndarray:
        """Of each row what belongs to its text, (n,) float64, NaN where it has none."""
        return np.array([*map(of_text, self.distinct_texts), np.nan], np.float64)[self.places]

    @property
    def places(self) -> np.ndarray:
        """Place of each row's value among the different ones, (n,) int64; their number where it is missing."""
        return np.where(self.is_missing, len(self.distinct), np.searchsorted(self.distinct, self.values))

    @cached_property
    def reading(self) -> Reading:
        """How its texts are numbers, if they are."""
        if self.texts is None:
            return Reading(self.spelling)
        return reading_of(self.distinct_texts, self.counts, self.likely)

    def as_numbers(self, spelling: Spelling = PLAIN) -> np.ndarray:
        """The rows as numbers, (n,) float64: texts that are none, and numbers that are too large, are NaN."""
        values = self.values if self.texts is None else self.looked_up(spelling.number)
        return np.where(np.abs(values) <= LARGEST_NUMBER, values, np.nan)  # false for NaN

    def spelling_like(self, trained: Spelling) -> Spelling:
        """How the numbers of new rows of a column are written."""
        if self.texts is None:
            return PLAIN
        return spelling_like(trained, self.distinct_texts, self.counts, self.likely)

    def typed(self) -> "Column":
        """With numbers for texts where nearly all that is there are numbers; else with one text for each category."""
        spelling = self.reading.spelling
        if spelling is not None:
            return Column(self.name, self.as_numbers(spelling), None, spelling)
        return self.with_one_text_a_category()

    def with_one_text_a_category(self) -> "Column":
        """A copy in which spellings of one category, such as 1 and 1.0, are one text."""
        texts = [*canonical(self.distinct_texts, self.counts), ""]
        return Column.of_codes(self.name, self.places, texts)

    def is_date(self) -> bool:
        """Whether nearly all values that are there are texts such as 2024-05-31, 31.5.2024 or 2024-05-31T12:30:00Z."""
        if self.texts is None:
            return False
        are_dates = [len(text) <= _LONGEST_DATE and _DATE.fullmatch(text) is not None for text in self.distinct_texts]
        return any(are_dates) and bool(self.counts[are_dates].sum() >= NEARLY_ALL * self.counts.sum())

    def date_parts(self) -> list["Column"]:
        """What a column of dates says in numbers; nothing where it is not clear whether day or month comes first."""
        readings = np.array([moment_of(text) for text in self.distinct_texts]).reshape(-1, 2)
        order, (day_first, month_first) = "", np.isfinite(readings).sum(axis=0)
        if not np.array_equal(readings[:, 0], readings[:, 1], equal_nan=True):
            order = "" if day_first == month_first else f", {'day' if day_first > month_first else 'month'} first"
            if not order:
                return []
        return [self.date_part(f"{part}{order}") for part in _PARTS_OF_DATE]

    def date_part(self, part: str) -> "Column":
        """Numbers, by one of `_PARTS_OF_DATE` and perhaps the order of day and month: "month, day first"."""
        kind, _, order = part.partition(", ")
        numbers = {text: moment_of(text)[order == "month first"] for text in self.distinct_texts}
        return Column(f"{self.name} ({part})", self.looked_up(lambda text: _PARTS_OF_DATE[kind](numbers[text])))


@dataclass(frozen=True)
class Table:
    """Columns of equally many rows, with different names.

    where: the table as messages call it. notes: what its owner should know of how it was read.
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
        """The column of a name, which may be that of a part of a date."""
        base, _, part = name.rpartition(" (")
        for column in self.columns:
            if column.name == name:
                return column
            if column.name == base and column.texts is not None and part.partition(",")[0].strip(")") in _PARTS_OF_DATE:
                return column.date_part(part.removesuffix(")"))
        return None

    def without(self, names: Iterable[str]) -> "Table":
        names = set(names)
        return replace(self, columns=tuple(column for column in self.columns if column.name not in names))

    def take(self, rows: np.ndarray) -> "Table":
        """Some of the rows: (k,) their places, or (n,) bool."""
        return replace(self, columns=tuple(column.take(rows) for column in self.columns))


def table_of_array(values: np.ndarray, names: Sequence[str], where: str) -> Table:
    """From values (n, m) of any type: a column for each of the m names."""
    return Table(where, tuple(Column.of_values(name, values[:, i]) for i, name in enumerate(names)))


def number_text(value: float) -> str:
    """3 for 3.0, else the shortest text from which float makes the same number."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _text(value: object) -> str:
    """Of an object in a column; the same for 1 and 1.0."""
    if isinstance(value, float):
        return number_text(float(value))
    return "" if value is None else str(value)
