"""Encodes tables as model inputs; the encoding is fitted on the training rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from data.files import shown
from data.tabular.labels import Labels, named_column
from data.tabular.spelling import PLAIN, Meaning, Spelling
from data.tabular.table import LARGEST_NUMBER, Column, Table
from trainer.common.errors import UserError

_LARGEST_CODE = 1e9
"""Largest absolute encoded number, in standard deviations; float32 can represent its square."""

_DATES = {"day first)": "31/05/2024", "month first)": "05/31/2024"}
"""Maps the ends of names of date features to dates in the order of the training rows."""


@dataclass(frozen=True)
class ColumnCode:
    """Encoding of one column.

    categories: names of categories, each encoded by its position, or None for a numeric column.
    mean, std: statistics by which numbers are standardised in float64; 0 and 1 for categories.
    spelling: format of the column's numbers.
    """

    name: str
    categories: tuple[str, ...] | None
    mean: float = 0.0
    std: float = 1.0
    spelling: Spelling = PLAIN

    @classmethod
    def of(cls, column: Column) -> "ColumnCode":
        if column.texts is not None:
            return cls(column.name, tuple(column.distinct_texts))
        if len(column.distinct) < 2:  # the mean of equal numbers may differ from the number in the last bit
            mean = float(column.distinct.sum())  # 0.0 for a column without numbers
            return cls(column.name, None, mean, spelling=column.spelling)
        values = column.values[~column.is_missing]
        std = float(values.std()) or 1.0  # 0 if squared differences underflow float64
        return cls(column.name, None, float(values.mean()), std, column.spelling)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ColumnCode":
        """Builds a column's encoding from the result of `asdict`; files of older versions lack "spelling"."""
        categories, spelling = values["categories"], Spelling(**values.get("spelling", {}))
        categories = None if categories is None else tuple(categories)
        return cls(**values | {"categories": categories, "spelling": spelling})

    def encode(self, column: Column) -> np.ndarray:
        """Encodes a column as (n,) float64, with NaN for missing values, text among numbers and unknown categories."""
        if self.categories is None:
            numbers = column.as_numbers(column.spelling_like(self.spelling))
            return np.clip((numbers - self.mean) / self.std, -_LARGEST_CODE, _LARGEST_CODE)
        key = Meaning(self.categories).key
        places = {key(text): float(i) for i, text in enumerate(self.categories)}
        return column.looked_up(lambda text: places.get(key(text), np.nan))

    def remarks(self, column: Column, source: Column) -> list[str]:
        """Returns sentences about a new column's values that count as missing or differ in format from training values.

        source: the column itself, or the column of dates from which it is derived.
        """
        encoded, found = self.encode(column), []
        spelling = column.spelling_like(self.spelling)
        if self.categories is None and spelling != self.spelling:
            for text in column.distinct_texts:
                number = spelling.number(text)
                if number == number != self.spelling.number(text):
                    found.append(
                        f"{self.name}: {text!r} is read as {number:g}, although the training rows use another "
                        "number format."
                    )
                    break
        lost = np.isnan(encoded) & ~source.is_missing
        if lost.any():
            example, what = source.take(lost).distinct_texts[0], "no training row has them"
            if source is not column:
                what = f"they are not dates such as {_DATES.get(self.name.rpartition(', ')[2], '2024-05-31')}"
            elif self.categories is None:
                is_number = not np.isnan(spelling.number(example))
                what = f"they exceed {LARGEST_NUMBER:g}" if is_number else "they are not numbers"
            unit = " ".join(filter(None, [self.spelling.head, self.spelling.tail]))
            what += f" with the unit {unit}" if unit else ""
            count = f"{lost.sum():,} of {len(lost):,} values, such as {example!r}, count as missing"
            found.append(f"{source.name}: {count}, because {what}.")
        return found


@dataclass(frozen=True)
class Encoding:
    """Encoding of a table.

    label: name of the column to predict. classes: values of the label column, in the order of class numbers.
    """

    columns: tuple[ColumnCode, ...]
    label: str
    classes: tuple[str, ...]

    @classmethod
    def fit(cls, features: Table, labels: Labels) -> "Encoding":
        return cls(tuple(map(ColumnCode.of, features.columns)), labels.name, labels.classes)

    def encode(self, table: Table) -> np.ndarray:
        """Encodes a table's features as (n, m) float32, NaN where missing.

        table: has all columns of the training table, before or after conversion by `Column.typed`; their order does
            not matter, and other columns are ignored. Raises UserError if a column is missing.
        """
        if lacking := {code.name for code in self.columns if table.column(code.name) is None}:
            raise UserError(f"{table.where}: lacks {shown(lacking)}; give all columns of the training table")
        columns = [code.encode(named_column(table, code.name, "column")) for code in self.columns]
        return np.stack(columns, axis=1).astype(np.float32)

    def refuse_label(self, table: Table) -> None:
        """Raises UserError if a table to classify has the label column."""
        if self.label in table.names:
            raise UserError(
                f"{table.where}: has the column {self.label!r}, which is the label to predict; remove the column"
            )

    def remarks(self, table: Table) -> list[str]:
        """Returns sentences on how a new table was read, on ignored columns, and on the values of other columns."""
        known = {code.name: code for code in self.columns}
        used = {name.rpartition(" (")[0] for name in known}  # includes date columns, which features are derived from
        others = [name for name in table.names if name not in {*known, *used} and name != self.label]
        found = [*table.notes, *([f"Ignored columns, which training did not use: {shown(others)}."] if others else [])]
        for code in self.columns:
            if (column := table.column(code.name)) is not None:
                found += code.remarks(column, table.source(code.name) or column)
        return list(dict.fromkeys(found))  # the features of a date have equal remarks

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Encoding":
        """Builds an encoding from the result of `asdict`, possibly after conversion to JSON and back."""
        columns = tuple(map(ColumnCode.from_dict, values["columns"]))
        return cls(columns, values["label"], tuple(values["classes"]))
