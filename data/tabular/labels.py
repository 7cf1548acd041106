"""The column that is to be predicted, as numbered classes."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.files import shown
from data.tabular.table import Column, Table
from trainer.common.errors import BadInput

_FEWEST_ROWS_PER_CLASS = 2
"""On average: a column with more values than that are measurements, or names of the rows."""


@dataclass(frozen=True)
class Labels:
    """The class of each row.

    classes: in order, by value where all are numbers, else by text.
    values: (n,) int64, places in classes; -1 where a row has no label.
    """

    name: str
    classes: tuple[str, ...]
    values: np.ndarray


def class_labels(table: Table, name: str) -> Labels:
    """Those of the column of --label. Raises BadInput where it is not there, or has no two classes."""
    column = named_column(table, name, "--label")
    classes = _in_order(column)
    values = class_numbers(column, classes)
    num_labelled = int((values >= 0).sum())
    where = f"{table.where}: --label {name}"
    if num_labelled == 0:
        raise BadInput(f"{where}: no row has a label; give a column with some")
    refuse_unless_classes(classes, num_labelled, where)
    return Labels(name, classes, values)


def refuse_unless_classes(classes: Sequence[str], num_labelled: int, where: str) -> None:
    """Raises BadInput for one class, and for so many that they are none. where: as the message begins."""
    if len(classes) == 1:
        raise BadInput(f"{where}: all rows are of one class, {classes[0]!r}; learning to tell classes apart takes two")
    if num_labelled < _FEWEST_ROWS_PER_CLASS * len(classes):
        raise BadInput(
            f"{where}: has {len(classes):,} different values in {num_labelled:,} rows, too many for classes; give a "
            "column of classes, or make classes of it (of a number, intervals)"
        )


def class_numbers(column: Column, classes: Sequence[str]) -> np.ndarray:
    """The place of each row's text in classes, (n,) int64; -1 where it has none, or another one."""
    places = {text: float(i) for i, text in enumerate(classes)}
    return np.nan_to_num(column.looked_up(lambda text: places.get(text, -1.0)), nan=-1.0).astype(np.int64)


def named_column(table: Table, name: str, flag: str) -> Column:
    """Raises BadInput, with the names that are meant perhaps, where there is no such column."""
    column = table.column(name)
    if column is None:
        by_lower = {known.lower(): known for known in table.names}
        near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
        known = f"perhaps {' or '.join(map(repr, near))} is meant" if near else f"there are {shown(table.names)}"
        raise BadInput(f"{table.where}: {flag} {name}: no such column; {known}")
    return column


def _in_order(column: Column) -> tuple[str, ...]:
    texts = column.distinct_texts
    numbers = Column.of_codes("", np.arange(len(texts)), texts).as_numbers()
    by_number = dict(zip(texts, numbers.tolist(), strict=True))
    return tuple(sorted(texts, key=by_number.__getitem__ if np.isfinite(numbers).all() else None))
