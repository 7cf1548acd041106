"""Which columns of a table are learned from, and what its owner should know of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.tabular.labels import Labels, class_labels, named_column
from data.tabular.table import Column, Table
from trainer.common.errors import BadInput

_FEWEST_ROWS = 10
"""With fewer, what looks like an id or a leak may be chance."""
_MOST_DISTINCT = 0.95
"""Of a column's texts; where more differ, they name the rows."""
_ID_NAME = re.compile(r"(?i:(.*[\W_])?(id|uuid|guid))|.*[a-z]I[dD]")
_MOST_NAMES_SHOWN = 10

EMPTY = "no value in any row"
CONSTANT = "the same value in every row"
DATES = "dates, which are not understood: add what matters of them as numbers, such as the month or an age in days"
ID = "a different value in every row, or nearly so, which names a row and tells nothing of another"


@dataclass(frozen=True)
class LabelledTable:
    """What is learned from.

    features: the columns that are left, numbers where they hold numbers; of the rows with a label.
    labels: of these rows; none is -1.
    notes: sentences for the owner of the table, the gravest first.
    """

    features: Table
    labels: Labels
    notes: tuple[str, ...]


def labelled_table(table: Table, label: str, drop: Sequence[str] = ()) -> LabelledTable:
    """Parts a table, as it was read, into features and labels.

    label: the column that is to be predicted. drop: columns that are not to be learned from.

    Raises BadInput where a column is not there, there are no two classes, or nothing is left to learn from.
    """
    labels = class_labels(table, label)
    for name in drop:
        named_column(table, name, "--drop")
    if label in drop:
        raise BadInput(f"{table.where}: --drop {label}: is the column of --label; name another one")
    rows = labels.values >= 0
    notes = []
    if not rows.all():
        notes.append(f"{(~rows).sum():,} of {table.num_rows:,} rows have no {label}, and are left out.")
    labels = Labels(label, labels.classes, labels.values[rows])
    features, of_columns = screened(table.without([label, *drop]), labels, rows)
    notes = [*of_columns, *notes, *_lonely_classes(labels)]
    return LabelledTable(features, labels, tuple(notes))


def screened(table: Table, labels: Labels, rows: np.ndarray) -> tuple[Table, list[str]]:
    """The columns that can be learned from, and sentences about them and the others.

    labels: of the rows (n,) bool, which are kept.
    """
    kept, left_out, leaks, mixed = [], dict[str, list[str]](), [], []
    for raw in table.columns:
        whole = raw.typed()
        column = whole.take(rows)
        if reason := _why_useless(whole, column):
            left_out.setdefault(reason, []).append(raw.name)
            continue
        kept.append(column)
        mixed += _what_is_no_number(raw, whole)
        if _tells_class(column, labels):
            leaks.append(_leak_warning(raw.name, labels.name))
    if not kept:
        reasons = "; ".join(f"{_shown(names)}: {reason}" for reason, names in left_out.items())
        raise BadInput(f"{table.where}: no column is left to learn from ({reasons or 'there is none'}); give others")
    told = [f"Left out: {_shown(names)} ({reason})." for reason, names in left_out.items()]
    return Table(table.where, tuple(kept)), leaks + told + mixed


def _why_useless(whole: Column, column: Column) -> str | None:
    """column: the rows of `whole` that are learned from."""
    if len(column.distinct) == 0:
        return EMPTY
    if len(column.distinct) == 1 and not column.is_missing.any():
        return CONSTANT
    if whole.is_date():
        return DATES
    return ID if _is_id(whole) else None


def _is_id(column: Column) -> bool:
    num_rows, num_distinct = len(column.values), len(column.distinct)
    if num_rows < _FEWEST_ROWS:
        return False
    if column.texts is not None:
        return bool(num_distinct > _MOST_DISTINCT * (~column.is_missing).sum())
    if num_distinct < num_rows:
        return False
    gaps = np.diff(column.distinct)
    are_whole = bool((column.distinct == np.floor(column.distinct)).all())
    return are_whole and (bool((gaps == 1).all()) or _ID_NAME.fullmatch(column.name) is not None)


def _tells_class(column: Column, labels: Labels) -> bool:
    """Whether each class has one value of its own, and no row another."""
    num_classes = len(labels.classes)
    present = ~column.is_missing
    if len(column.distinct) != num_classes or present.sum() < _FEWEST_ROWS:
        return False
    pairs = np.unique(np.stack([column.values[present], labels.values[present]], axis=1), axis=0)
    return len(pairs) == num_classes == len(np.unique(pairs[:, 1]))


def _leak_warning(name: str, label: str) -> str:
    return (
        f"WARNING: {name} alone tells {label}, by one value for each class. If it is a copy of it, or is known only "
        f"afterwards, leave it out: --drop {name!r}."
    )


def _what_is_no_number(raw: Column, typed: Column) -> list[str]:
    lost = typed.is_missing & ~raw.is_missing
    if not lost.any():
        return []
    count = f"{lost.sum():,} of {len(lost):,} values count as missing"
    return [f"{raw.name}: {count}, as they are no numbers, such as {raw.take(lost).distinct_texts[0]!r}."]


def _lonely_classes(labels: Labels) -> list[str]:
    """A class with one row can be learned, but not held out to be scored."""
    lonely = [labels.classes[i] for i in np.flatnonzero(np.bincount(labels.values) == 1)]
    return [f"{labels.name}: classes with one row alone are never held out: {_shown(lonely)}."] if lonely else []


def _shown(names: Sequence[str]) -> str:
    num_more = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "")
