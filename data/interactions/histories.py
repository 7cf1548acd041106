"""Reads the file given by `--predict`: histories of the users to whom a model recommends items."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.files import shown
from data.interactions.columns import ColumnChoice
from data.interactions.item_sets import numbered
from data.interactions.reader import Interactions, find_files, in_time_order
from data.interactions.sequences import scaled, shortest_gaps
from data.interactions.table import Table, read_table
from data.table_files import STRICT, Reading
from trainer.common.errors import UserError
from trainer.loading.arrays import Ragged
from trainer.loading.cache import Arrays
from trainer.loading.order import SampleKeys


class Histories:
    """Data set of recommendations: sample i asks for the item at rank i % num_places for user i // num_places.

    user_ids: names of the users, in the order of `Table.user_ids`. remarks: lines to print.
    """

    def __init__(
        self, path: Path, columns: ColumnChoice, item_ids: Sequence[str], *, maxlen: int, num_places: int,
        with_times: bool, mask_seen: bool, reading: Reading = STRICT,
    ) -> None:  # fmt: skip
        """Reads a file of interactions like `load_interactions`, but numbers items as a trained model does.

        item_ids: names of the model's items 1, 2, ...; other items are dropped with a remark. maxlen: number of
        last items that the model uses. with_times: whether it uses times. mask_seen: whether to exclude seen items.

        Raises UserError if the file cannot be read, if no user remains, or if fewer than num_places items can be
        recommended to a user.
        """
        [file] = find_files(path, "--predict")[-1:]
        table = read_table([file], columns, reading)
        if with_times and table.times is None:
            raise UserError(f"{file.where}: has no times, but the run was trained with times; add a time column")
        self.remarks = list(table.remarks)
        self._interactions, self.user_ids = self._known(table, item_ids, file.where)
        self._maxlen, self.num_places, self._mask_seen = maxlen, num_places, mask_seen
        times = self._interactions.times
        self._times = None
        if times is not None and with_times:
            offsets = self._interactions.offsets
            users, _ = numbered(np.diff(offsets))
            self._times = scaled(times, times[offsets[users]], shortest_gaps(offsets, times)[offsets[users + 1] - 1])
        self._refuse_too_many_places(file.where)

    def _known(self, table: Table, item_ids: Sequence[str], where: str) -> tuple[Interactions, list[str]]:
        number_of = {name: number for number, name in enumerate(item_ids, start=1)}
        numbers = np.array([number_of.get(name, 0) for name in table.item_ids])
        kept = np.flatnonzero(numbers[table.items])
        if not len(kept):
            raise UserError(
                f"{where}: the run was not trained on any item of this file; write item ids as in the training data, "
                f"such as {shown(item_ids[:3])}"
            )
        if len(kept) < len(table.items):
            unknown = [name for name, number in zip(table.item_ids, numbers, strict=True) if not number]
            self.remarks.append(
                f"Warning: {len(table.items) - len(kept):,} of {len(table.items):,} interactions are left out, "
                f"because the run was not trained on their items: {shown(unknown)}."
            )
        users, counts = np.unique(table.users[kept], return_counts=True)
        if len(users) < len(table.user_ids):
            missing = np.delete(np.arange(len(table.user_ids)), users)
            names = shown(table.user_ids[user] for user in missing)
            self.remarks.append(
                "Warning: these users get no recommendations, because the run was not trained on any of their items: "
                f"{names}."
            )
        times = None if table.times is None else table.times[kept]
        order = in_time_order(table.users[kept], times, None)
        return Interactions(
            np.concatenate([[0], np.cumsum(counts)]),
            numbers[table.items[kept]][order].astype(np.int32),
            None if times is None else np.floor(times[order]).astype(np.int64),
            len(item_ids),
            "",
        ), [table.user_ids[user] for user in users]

    def _refuse_too_many_places(self, where: str) -> None:
        offsets, items = self._interactions.offsets, self._interactions.items
        left = {}
        for user, name in enumerate(self.user_ids):
            history = items[offsets[user] : offsets[user + 1]]
            num_seen = len(np.unique(history)) if self._mask_seen else 0
            if self._interactions.num_items - num_seen < self.num_places:
                left[name] = self._interactions.num_items - num_seen
        if left:
            fewest = min(left.values())
            fewer = f"choose at most {fewest}, or remove" if fewest else "remove"
            raise UserError(
                f"--top-k {self.num_places}: {where}: fewer than {self.num_places} items are left to recommend to "
                f"{shown(f'user {name} ({num} left)' for name, num in left.items())}; {fewer} these users"
            )

    def __len__(self) -> int:
        return len(self.user_ids) * self.num_places

    def __getitems__(self, keys: SampleKeys) -> Arrays:
        """Returns the last maxlen items of each history, in time order.

        {"items": (B, T) int64; "length": (B,) int64; "times": (B, T) int32, scaled times from 1, if the model needs
        them; "seen": (B, S) int64, the whole history, if mask_seen; "user": (B,) int64; "place": (B,) int64, ranks}.
        """
        users, place = np.divmod(keys.index, self.num_places)
        start, end = self._interactions.offsets[users], self._interactions.offsets[users + 1]
        length = np.minimum(end - start, self._maxlen)
        rows = Ragged(end - length, length, length.max(initial=0))
        batch: Arrays = {
            "items": rows.of(self._interactions.items).astype(np.int64),
            "length": length,
            "user": users,
            "place": place,
        }
        if self._times is not None:
            batch["times"] = rows.of(self._times)
        if self._mask_seen:
            history = Ragged(start, end - start, (end - start).max(initial=0))
            batch["seen"] = history.of(self._interactions.items).astype(np.int64)
        return batch
