"""Class labels from the column to predict, and stratified splits."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.csv_lines import is_number
from data.files import shown
from data.tabular.spelling import PLAIN, is_mark_among_numbers
from data.tabular.table import Column, Table
from trainer.common.errors import UserError
from trainer.loading.counter_random import random_bits

_FEWEST_ROWS_PER_CLASS = 2
"""Minimum average number of rows per class; a column with fewer is taken for measurements or row names."""
_FEWEST_ROWS_PER_NUMBER = 5
"""Minimum average number of rows per distinct number for a column of many whole numbers to count as classes."""
_MOST_NUMBERS, _MOST_FRACTIONS = 20, 10
"""A column with at most 20 distinct whole numbers, or at most 10 distinct fractions, never counts as a quantity."""


@dataclass(frozen=True)
class Labels:
    """Class of each row of a table.

    classes: names of classes, sorted by value if all are numbers, else alphabetically.
    values: (n,) int64, positions in classes; -1 for rows without a label.
    may_be_quantity: whether the classes are many whole numbers and therefore might be a quantity.
    """

    name: str
    classes: tuple[str, ...]
    values: np.ndarray
    may_be_quantity: bool = False


def class_labels(table: Table, name: str) -> Labels:
    """Reads labels from the column `name`.

    Raises UserError if the column is missing, contains a quantity, or has fewer than two classes.
    """
    column = named_column(table, name, "--label")
    where = f"{table.where}: --label {name}"
    spelling = column.reading.spelling
    number_of = (spelling or PLAIN).number
    column = column.with_one_text_a_category()
    texts = column.distinct_texts
    numbers = {text: number_of(text) for text in texts if not is_mark_among_numbers(text)}
    quantity = [number for number in numbers.values() if not math.isnan(number)]
    are_numbers = 0 < len(quantity) == len(numbers)
    classes = sorted(numbers, key=numbers.__getitem__) if are_numbers else sorted(texts)
    values = class_numbers(column, classes)
    num_labelled = int((values >= 0).sum())
    if num_labelled == 0:
        raise UserError(f"{where}: no row has a label; give a column with labels")
    if spelling is not None:
        _refuse_quantity(quantity, num_labelled, where)
    refuse_unless_classes(classes, num_labelled, where)
    return Labels(name, tuple(classes), values, are_numbers and len(classes) > _MOST_NUMBERS)


def _refuse_quantity(numbers: Sequence[float], num_labelled: int, where: str) -> None:
    are_whole = all(map(float.is_integer, numbers))
    are_repeated = are_whole and num_labelled >= _FEWEST_ROWS_PER_NUMBER * len(numbers)
    if len(numbers) > (_MOST_NUMBERS if are_whole else _MOST_FRACTIONS) and not are_repeated:
        raise UserError(
            f"{where}: has {len(numbers):,} different numbers from {min(numbers):g} to {max(numbers):g} in "
            f"{num_labelled:,} rows, but only classes can be predicted (no regression); group the numbers into "
            "intervals, or, if they name classes, write them as text, such as c1"
        )


def refuse_unless_classes(classes: Sequence[str], num_labelled: int, where: str) -> None:
    """Raises UserError for a single class, or for too many values to be classes. where: beginning of the message."""
    if len(classes) == 1:
        raise UserError(
            f"{where}: has only one class, {classes[0]!r} (NA and similar values are not classes); give a column "
            "with at least two classes"
        )
    if num_labelled < _FEWEST_ROWS_PER_CLASS * len(classes):
        raise UserError(
            f"{where}: has {len(classes):,} different values in {num_labelled:,} rows, too many for classes; give "
            "another column, or group the values into fewer classes, such as intervals"
        )


def class_numbers(column: Column, classes: Sequence[str]) -> np.ndarray:
    """Returns the position of each row's value in classes, (n,) int64; -1 for missing and unknown values."""
    places = {text: float(i) for i, text in enumerate(classes)}
    return np.nan_to_num(column.looked_up(lambda text: places.get(text, -1.0)), nan=-1.0).astype(np.int64)


def named_column(table: Table, name: str, flag: str) -> Column:
    """Returns a column by name. Raises UserError, which suggests similar names, if the column does not exist."""
    column = table.column(name)
    if column is None:
        by_lower = {known.lower(): known for known in table.names}
        near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
        known = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the columns are {shown(table.names)}"
        if flag == "--drop" and any("," in other for other in table.names):
            known += r" (write a comma in a name as '\,')"
        if len(table.names) == 1:
            known = (
                f"the table has only the column {table.names[0]!r}; separate columns with commas, semicolons or tabs"
            )
        elif not near and any(map(is_number, table.names)):
            known += "; if these are values, docs/formats.md#no-line-of-names shows how to add names"
        raise UserError(f"{table.where}: {flag} {name}: no such column; {known}")
    return column


def stratified_hold_out(labels: np.ndarray, share: float, seed: int, stream: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of training rows and of held-out rows, (k,) int64 each, ascending, stratified by class.

    Random numbers are a function of (seed, stream, position of the row). The number of held-out rows is the rounded
    share of all rows, before two corrections: the only row of a class is a training row, and every larger class has at
    least one row in each part.

    labels: (n,) int64, at least 0. share: share of rows to hold out, above 0 and below 1.
    """
    sizes = np.bincount(labels)
    num_held = _rounded(sizes, share)
    chance = random_bits(seed, 0, np.arange(len(labels)), 1, stream)[:, 0]
    order = np.lexsort((chance, labels))
    place_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held = np.zeros(len(labels), bool)
    held[order] = place_in_class < num_held[labels[order]]
    return np.flatnonzero(~held), np.flatnonzero(held)


def _rounded(sizes: np.ndarray, share: float) -> np.ndarray:
    """Returns each class's number of held-out rows (see `stratified_hold_out`), by the largest-remainder method."""
    exact = share * sizes
    num_held = np.floor(exact).astype(np.int64)
    num_missing = round(share * int(sizes.sum())) - int(num_held.sum())
    num_held[np.argsort(num_held - exact, kind="stable")[:num_missing]] += 1
    return np.where(sizes > 1, np.clip(num_held, 1, np.maximum(sizes - 1, 1)), 0)
