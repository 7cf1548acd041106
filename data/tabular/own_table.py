"""Splits and encodes the user's table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data.tabular.encoding import Encoding
from data.tabular.labels import class_numbers, named_column, stratified_hold_out
from data.tabular.screening import LabelledTable
from data.tabular.table import Table
from trainer.common.errors import UserError

_SPLIT_SEED = 0
"""Seed of the split, independent of --seed so that all runs are scored on the same rows."""


class EncodedRows(NamedTuple):
    """Encoded rows with known classes.

    features: (n, m) float32. labels: (n,) int64.
    """

    features: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class OwnTable:
    """A user's table, split and encoded.

    encoding: fitted on the training rows. parts: rows by name: "train", "val" and "test". notes: sentences for the user
    on separate validation and test files.
    """

    encoding: Encoding
    parts: Mapping[str, EncodedRows]
    notes: Sequence[str]

    @cached_property
    def context(self) -> EncodedRows:
        """Returns the rows from which predictions are made: training rows, then validation rows."""
        return EncodedRows(*map(np.concatenate, zip(self.parts["train"], self.parts["val"], strict=True)))


def split_table(table: LabelledTable, others: Mapping[str, Table], shares: Mapping[str, float]) -> OwnTable:
    """Splits a table into rows for "train", "val" and "test", stratified by class, and encodes them.

    others: separate tables for "val" or "test". shares: for "test", the share of the rows to hold out; for "val", the
    share of the remaining rows. Raises UserError if a share leaves a part without rows, or if a table in `others` has
    no row of a known class.
    """
    labels = table.labels.values
    rows = {"train": np.arange(len(labels)), "val": np.arange(0), "test": np.arange(0)}
    for stream, part in enumerate(("test", "val")):
        share = shares.get(part, 0.0)
        if share > 0 and part not in others:
            kept, out = stratified_hold_out(labels[rows["train"]], share, _SPLIT_SEED, stream)
            if len(out) == 0:
                raise UserError(
                    f"{table.features.where}: has too few rows per class to hold out a share of {share:g}; give more "
                    "rows"
                )
            rows["train"], rows[part] = rows["train"][kept], rows["train"][out]
    encoding = Encoding.fit(table.features.take(rows["train"]), table.labels)
    parts = {
        name: EncodedRows(encoding.encode(table.features.take(places)), labels[places]) for name, places in rows.items()
    }
    notes: list[str] = []
    for name, other in others.items():
        parts[name] = _labelled(other, table, encoding, notes)
    return OwnTable(encoding, parts, notes)


def _labelled(table: Table, known: LabelledTable, encoding: Encoding, notes: list[str]) -> EncodedRows:
    """Encodes a table's rows whose classes occur in `known`, and adds notes on all other rows."""
    column = named_column(table, known.labels.name, "--label").with_one_text_a_category()
    values = class_numbers(column, known.labels.classes)
    found, other = encoding.remarks(table), column.take((values < 0) & ~column.is_missing).distinct_texts
    if num_lost := int((values < 0).sum()):
        what = f" (such as {other[0]!r})" if other else ""
        found.append(
            f"{num_lost:,} of {len(values):,} rows are left out, because they have no class, or a class{what} that "
            "does not occur in --data-dir."
        )
        if num_lost == len(values):
            raise UserError(f"{table.where}: {found[-1]} Give rows with classes that occur in --data-dir")
    notes += [f"{table.where}: {note}" for note in found]
    return EncodedRows(encoding.encode(table)[values >= 0], values[values >= 0])
