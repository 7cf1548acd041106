"""A table as the numbers that a model takes, by what the rows that it learns from hold."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from data.files import shown
from data.tabular.labels import Labels, named_column
from data.tabular.spelling import PLAIN, Meaning, Spelling
from data.tabular.table import Column, Table
from trainer.common.errors import UserError

_LARGEST_CODE = 1e9
"""In standard deviations: float32 keeps their squares."""


@dataclass(frozen=True)
class ColumnCode:
    """How one column becomes numbers.

    categories: texts, coded by their places; None for a column of numbers.
    mean, std: of its numbers, which become standard deviations from the mean: float32 would not keep the digits of
        small differences between large numbers. 0 and 1 for categories.
    spelling: of its numbers.
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
        if len(column.distinct) < 2:  # the mean of equal numbers may differ from them in the last bit
            mean = float(column.distinct.sum())  # 0.0 where there is none
            return cls(column.name, None, mean, spelling=column.spelling)
        values = column.values[~column.is_missing]
        std = float(values.std()) or 1.0  # 0 of differences whose squares are too small for float64
        return cls(column.name, None, float(values.mean()), std, column.spelling)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ColumnCode":
        """Builds it from the result of `asdict`, perhaps of a version without spellings."""
        categories, spelling = values["categories"], Spelling(**values.get("spelling", {}))
        return cls(**values | {"categories": _if_any(tuple, categories), "spelling": spelling})

    def encode(self, column: Column) -> np.ndarray:
        """(n,) float64, NaN where a value is missing, no number, or a category that is not known."""
        if self.categories is None:
            numbers = column.as_numbers(column.spelling_like(self.spelling))
            return np.clip((numbers - self.mean) / self.std, -_LARGEST_CODE, _LARGEST_CODE)
        key = Meaning(self.categories).key
        places = {key(text): float(i) for i, text in enumerate(self.categories)}
        return column.looked_up(lambda text: places.get(key(text), np.nan))

    def remarks(self, column: Column) -> list[str]:
        """Sentences about a column of new rows."""
        encoded, found = self.encode(column), []
        spelling = column.spelling_like(self.spelling)
        if self.categories is None and spelling != self.spelling:
            for text in column.distinct_texts:
                number = spelling.number(text)
                if number == number != self.spelling.number(text):
                    found.append(f"{self.name}: {text!r} is read as {number:g}, in training it would not be.")
                    break
        lost = np.isnan(encoded) & ~column.is_missing
        if lost.any():
            what = "they are no numbers" if self.categories is None else "no row that was learned from has them"
            unit = " ".join(filter(None, [self.spelling.head, self.spelling.tail]))
            what += f" with the unit {unit}" if unit else ""
            count = f"{lost.sum():,} of {len(lost):,} values count as missing"
            found.append(f"{self.name}: {count}, as {what}, such as {column.take(lost).distinct_texts[0]!r}.")
        return found


@dataclass(frozen=True)
class Encoding:
    """How a table becomes numbers; plain values, which JSON and checkpoints keep.

    label: the column that is predicted. classes: its values, in the order of their numbers.
    """

    columns: tuple[ColumnCode, ...]
    label: str
    classes: tuple[str, ...]

    @classmethod
    def fit(cls, features: Table, labels: Labels) -> "Encoding":
        """By the columns of a `LabelledTable`, or of some of its rows."""
        return cls(tuple(map(ColumnCode.of, features.columns)), labels.name, labels.classes)

    def encode(self, table: Table) -> np.ndarray:
        """The features of a table, (n, m) float32, NaN where one is missing.

        table: has the columns that were learned from, in any order, and perhaps others, which do not count; as it was
            read, or typed. Raises UserError where it lacks some.
        """
        if lacking := {code.name for code in self.columns if table.column(code.name) is None}:
            raise UserError(f"{table.where}: lacks {shown(lacking)}; give all columns that were learned from")
        columns = [code.encode(named_column(table, code.name, "column")) for code in self.columns]
        return np.stack(columns, axis=1).astype(np.float32)

    def refuse_label(self, table: Table) -> None:
        """Raises UserError for a table that is to be predicted, and holds what is predicted."""
        if self.label in table.names:
            raise UserError(f"{table.where}: has the column {self.label!r}, which is what is predicted; take it out")

    def remarks(self, table: Table) -> list[str]:
        """Sentences about what of a new table cannot be used, or is read in another way than in training."""
        known = {code.name: code for code in self.columns}
        used = {name.rpartition(" (")[0] for name in known}  # perhaps dates
        others = [name for name in table.names if name not in {*known, *used} and name != self.label]
        found = [*table.notes, *([f"Not learned from, and ignored: {shown(others)}."] if others else [])]
        for code in self.columns:
            if (column := table.column(code.name)) is not None:
                found += code.remarks(column)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Of lists, texts and numbers."""
        columns = [asdict(code) for code in self.columns]
        for column in columns:
            column["categories"] = _if_any(list, column["categories"])
        return {"columns": columns, "label": self.label, "classes": list(self.classes)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Encoding":
        """What `to_dict` gave."""
        columns = tuple(map(ColumnCode.from_dict, values["columns"]))
        return cls(columns, values["label"], tuple(values["classes"]))


def _if_any(kind: type, texts: Sequence[str] | None) -> Any:
    return None if texts is None else kind(texts)
