"""Chooses the columns to learn from, and reports on a table's columns."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from data.tabular.labels import Labels, class_labels, named_column
from data.tabular.spelling import is_plain
from data.tabular.table import LARGEST_NUMBER, Column, Table
from trainer.common.errors import UserError

_FEWEST_ROWS = 10
"""Minimum number of rows to detect row ids and copies of the label; with fewer rows, chance may produce them."""
_MOST_DISTINCT = 0.95
"""Share of distinct values above which a column of strings counts as row names."""
_ID_NAME = re.compile(r"(?i:(.*[\W_])?(id|uuid|guid))|.*[a-z]I[dD]")
_MOST_NAMES_SHOWN = 10
_NOTHING: Mapping[str, str] = {}

EMPTY = "no value in any row"
TOO_LARGE = f"no finite number up to {LARGEST_NUMBER:g} in any row"
CONSTANT = "the same value in every row"
EQUAL = "all dates are equal"
AMBIGUOUS = "ambiguous order of day and month; write 2024-05-31"
ID = "identifies rows: nearly every row has a different value"
HEADING = ("column", "kind", "missing", "values", "note")


class ColumnReport(NamedTuple):
    """Report on a column, printed as a line below `HEADING`; the note may be empty."""

    name: str
    kind: str
    num_missing: int
    values: str
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return self.name, self.kind, f"{self.num_missing:,}" if self.num_missing else "", self.values, self.note


@dataclass(frozen=True)
class LabelledTable:
    """Features and labels to learn from.

    features: the columns to learn from, after `Column.typed`, with only the labelled rows.
    labels: labels of these rows, none of which is -1.
    reports: reports on the label, then on excluded columns, columns with a note, and other columns.
    warnings: sentences for the user.
    """

    features: Table
    labels: Labels
    reports: tuple[ColumnReport, ...]
    warnings: tuple[str, ...]


def labelled_table(table: Table, label: str, drop: Mapping[str, str] = _NOTHING) -> LabelledTable:
    """Splits a table into features and labels.

    label: name of the column to predict. drop: for each column to exclude, the flag that names the column.

    Raises UserError if a column does not exist, there are fewer than two classes, or no feature remains.
    """
    labels = class_labels(table, label)
    left_out = [_left_out(named_column(table, name, flag), flag) for name, flag in drop.items()]
    if label in drop:
        raise UserError(f"{table.where}: {drop[label]} {label}: names the --label column; give another column")
    rows = labels.values >= 0
    labels = replace(labels, values=labels.values[rows])
    features, reports, warnings = screened(table.without([label, *drop]), labels, rows)
    return LabelledTable(
        features, labels, (_report_of(labels, int((~rows).sum())), *left_out, *reports), tuple(warnings)
    )


def screened(table: Table, labels: Labels, rows: np.ndarray) -> tuple[Table, list[ColumnReport], list[str]]:
    """Returns the usable columns, reports on all columns, and warnings.

    rows: (n,) bool, the rows to keep. labels: labels of these rows.
    """
    kept, left_out, noted, plain, warnings = [], list[ColumnReport](), list[ColumnReport](), list[ColumnReport](), []
    for raw in table.columns:
        whole = raw.typed()
        column = whole.take(rows)
        if whole.is_date():
            dates = raw.date_parts()
            parts = [part for date in dates if len((part := date.take(rows)).distinct) > 1]
            kept += parts
            is_missing = dates[0].is_missing if dates else raw.is_missing
            used, lost = ", ".join(part.name for part in parts), raw.take(is_missing & ~raw.is_missing)
            notes = [f"used as features: {used}"] if parts else []
            if num_lost := len(lost.values):
                count = f"{num_lost:,} of {len(raw.values):,} dates, such as {lost.distinct_texts[0]!r}"
                notes.insert(0, f"{count}, cannot be read; write 2024-05-31")
            kind, note = "date" if parts else "left out", "; ".join(notes) or (EQUAL if dates else AMBIGUOUS)
            report = ColumnReport(raw.name, kind, int(is_missing.sum()), _values(raw), note)
            (left_out if not parts else noted if num_lost else plain).append(report)
            continue
        if reason := _why_useless(raw, whole, column):
            left_out.append(_left_out(raw, reason))
            continue
        kept.append(column)
        report = _report(raw, whole)
        (noted if report.note else plain).append(report)
        if _tells_class(column, labels):
            warnings.append(_leak_warning(raw.name, labels.name))
    if not kept:
        reasons = "; ".join(f"{report.name}: {report.note}" for report in left_out[:_MOST_NAMES_SHOWN])
        raise UserError(f"{table.where}: has no column to learn from ({reasons or 'only the label'}); add columns")
    return replace(table, columns=tuple(kept)), left_out + noted + plain, [*table.notes, *warnings]


def _why_useless(raw: Column, whole: Column, column: Column) -> str | None:
    """Explains why a column cannot be used; returns None if it can.

    whole: the column after `Column.typed`. column: the same column with only the rows to learn from.
    """
    if len(column.distinct) == 0:
        return EMPTY if raw.is_missing.all() or not whole.is_missing.all() else TOO_LARGE
    if len(column.distinct) == 1 and not column.is_missing.any():
        return CONSTANT
    return "; ".join(filter(None, [raw.reading.doubt, ID])) if _is_id(whole) else None


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
    """Returns whether a column has exactly one value for each class, and different values for different classes."""
    num_classes = len(labels.classes)
    present = ~column.is_missing
    if len(column.distinct) != num_classes or present.sum() < _FEWEST_ROWS:
        return False
    pairs = np.unique(np.stack([column.values[present], labels.values[present]], axis=1), axis=0)
    return len(pairs) == num_classes == len(np.unique(pairs[:, 1]))


def _leak_warning(name: str, label: str) -> str:
    quoted = shlex.quote(name.replace(",", r"\,"))
    return (
        f"WARNING: the values of {name} match the classes of {label} one to one. If {name} is a copy of {label}, or "
        f"is not known when you predict, add --drop {quoted}."
    )


def _left_out(raw: Column, reason: str) -> ColumnReport:
    return ColumnReport(raw.name, "left out", int(raw.is_missing.sum()), _values(raw), reason)


def _report(raw: Column, typed: Column) -> ColumnReport:
    num_missing = int(typed.is_missing.sum())
    if typed.texts is not None:
        note = raw.reading.doubt or _differ_by_case(typed.distinct_texts)
        return ColumnReport(raw.name, "category", num_missing, _values(typed), note)
    notes = []
    number, texts = typed.spelling.number, raw.distinct_texts if raw.texts is not None else []
    if odd := [text for text in texts if not (_is_usual(text) or math.isnan(number(text)))]:
        example = max(odd, key=len)
        notes.append(f"{example!r} is read as {number(example):.10g}")
    lost = raw.take(typed.is_missing & ~raw.is_missing)
    if len(lost.distinct) == 1:
        notes.append(f"{lost.distinct_texts[0]!r} counts as missing")
    elif len(lost.distinct) > 1:
        notes.append(f"{_shown(list(map(repr, lost.distinct_texts)))} count as missing, because they are not numbers")
    return ColumnReport(raw.name, "number", num_missing, _values(typed), "; ".join(notes))


def _is_usual(text: str) -> bool:
    """Returns whether a string is a number as programs write it, without the leading zero of codes such as 01067."""
    return is_plain(text) and not re.match(r"0\d", text)


def _report_of(labels: Labels, num_missing: int) -> ColumnReport:
    counts = np.bincount(labels.values, minlength=len(labels.classes)).tolist()
    lonely = [name for name, count in zip(labels.classes, counts, strict=True) if count == 1]
    notes = [
        _differ_by_case(labels.classes),
        "possibly a quantity, but each number counts as a class" if labels.may_be_quantity else "",
        "rows without a label are left out" if num_missing else "",
        f"classes with a single row, which is never held out: {_shown(lonely)}" if lonely else "",
    ]
    shown = [f"{name} ({count:,})" for name, count in zip(labels.classes, counts, strict=True)]
    values = f"{len(shown)} classes: {_shown(shown)}"
    return ColumnReport(labels.name, "label", num_missing, values, "; ".join(filter(None, notes)))


def _values(column: Column) -> str:
    """Describes a column by its smallest and largest number, or by some of its categories."""
    if len(column.distinct) == 0:
        return ""
    if column.texts is None:
        return f"{column.distinct[0]:.7g} to {column.distinct[-1]:.7g}"
    return f"{len(column.distinct):,}: {_shown(column.distinct_texts)}"


def _differ_by_case(texts: Sequence[str]) -> str:
    """Returns a note on two categories of two or more letters that differ only in case; "" if there are none."""
    seen = dict[str, str]()
    for text in texts:
        if (other := seen.setdefault(text.lower(), text)) != text and len(text) > 1:
            return f"{other!r} and {text!r} are different categories"
    return ""


def _shown(names: Sequence[str]) -> str:
    num_more = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "")
