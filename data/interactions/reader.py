"""Who interacted with what, when: reads files of interactions, a user's own and those of published data sets."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import DataFile
from data.interactions.columns import FIND_OUT, ColumnChoice
from data.interactions.table import read_table
from data.table_files import STRICT, Reading, tables_at
from trainer.common.errors import UserError
from trainer.loading.cache import Arrays, array_of_texts, cached_arrays, key_of, texts_of_array

_FORMAT_VERSION = 9
_KNOWN_NAMES = ("ratings.dat", "u.data", "ratings.csv")


@dataclass(frozen=True)
class Interactions:
    """Interactions by user, each user's in time order; equal times keep the order of the file.

    offsets: (num_users + 1,) int64; those of user u are at offsets[u] to offsets[u + 1].
    items: (n,) int32, 1..num_items; 0 is left for padding.
    times: (n,) int64 seconds, or None where the source has none.
    num_items: size of the catalogue.
    held_out: (num_users, 2) int64, how many of each user's last interactions are validation, then test, where files of
        their own hold these; else None.
    key: names the content in the cache.
    item_ids: (num_items,), what the items are called in the file: item 1, item 2, ...
    remarks: what the user should know of how the file was read.
    """

    offsets: np.ndarray
    items: np.ndarray
    times: np.ndarray | None
    num_items: int
    key: str
    item_ids: Sequence[str] = ()
    remarks: Sequence[str] = ()
    held_out: np.ndarray | None = None

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1


def load_interactions(
    path: Path, k_core: int, cache_dir: Path, columns: ColumnChoice = FIND_OUT, reading: Reading = STRICT
) -> Interactions:
    """Reads interactions and keeps them parsed in the cache.

    A file has one interaction a line; see `data.interactions.columns` for what is where in it. Tabs, `::`, semicolons,
    commas, | or blanks separate the fields, and of the former but `::` a field may stand in quotes; or it holds JSON
    lines or parquet. Users and items are
    any text. They are numbered in the order of their names, those that are whole numbers by value. Repeated
    interactions stay, since people buy again, but lines of one user, item and time count once. Without times the order
    of the file is the order in time.

    path: a file, plain or compressed by gzip, bzip2 or xz; or a folder, `.zip` or `.tar.gz` with exactly one file that
        can be meant: `ratings.dat`, `u.data` or `ratings.csv`, else the only one with the name of a table (`TABLES`);
        or with files of one layout for training, validation and test (`parts_at`).
        Archives are read in memory; nothing is unpacked to disk.
    k_core: users and items with fewer interactions are dropped, until there are none; 1 or less keeps all.

    Raises UserError when the file is not there, cannot be chosen, is damaged or has a line that cannot be read, when
    its columns are not known, or when the k-core is empty.
    """
    files = find_files(path)
    k_core = max(k_core, 1)
    key = key_of("interactions", _FORMAT_VERSION, [file.stamp for file in files], k_core, columns, reading)
    arrays = cached_arrays(cache_dir, key, lambda: _build(files, k_core, columns, reading))
    return Interactions(
        arrays["offsets"],
        arrays["items"],
        arrays.get("times"),
        int(arrays["num_items"]),
        key,
        texts_of_array(arrays["item_ids"]),
        texts_of_array(arrays["remarks"]),
        arrays.get("held_out"),
    )


def find_files(path: Path, flag: str = "--data-dir") -> list[DataFile]:
    """The file of interactions that a path leads to, or those of training, perhaps validation, and test.

    flag: by which the path was given. Raises UserError.
    """
    path = Path(os.path.realpath(path))  # which does not raise for a link that leads to itself
    return tables_at(path, flag, "give a file of interactions", _KNOWN_NAMES)


def _build(files: Sequence[DataFile], k_core: int, columns: ColumnChoice, reading: Reading) -> Arrays:
    table = read_table(files, columns, reading)
    kept = _k_core(table.users, table.items, k_core)
    if not len(kept):
        raise UserError(
            f"--k-core {k_core}: nothing of {files[0].where} is left when users and items with fewer than {k_core} "
            "interactions are dropped; choose a smaller number"
        )
    users, items = (_without_gaps(codes[kept]) for codes in (table.users, table.items))
    remarks = list(table.remarks)
    if len(kept) < len(table.users):
        remarks.append(
            f"--k-core {k_core} leaves {len(kept):,} of {len(table.users):,} interactions, {users.max() + 1:,} of "
            f"{len(table.user_ids):,} users and {items.max() + 1:,} of {len(table.item_ids):,} items."
        )
    parts = table.parts[kept] if len(files) > 1 else None
    order = in_time_order(users, None if table.times is None else table.times[kept], parts)
    arrays = {
        "offsets": np.concatenate([[0], np.cumsum(np.bincount(users))]),
        "items": (items[order] + 1).astype(np.int32),
        "num_items": np.array(items.max() + 1),
        "item_ids": array_of_texts([table.item_ids[i] for i in np.unique(table.items[kept])]),
    }
    if parts is not None:
        of_parts = [np.bincount(users[parts == part], minlength=int(users.max()) + 1) for part in range(len(files))]
        # Without a file of validation the last interaction of training is that.
        held_out = of_parts[1:] if len(files) == 3 else [(of_parts[0] > 1).astype(np.int64), of_parts[1]]
        arrays["held_out"] = np.stack(held_out, axis=1)
        counts = ", ".join(f"{count.sum():,} of {file.name}" for count, file in zip(of_parts, files, strict=True))
        remarks.append(f"What is held out is what the files say: {counts}.")
    if table.times is not None:
        # Fractions of a second count for the order only.
        arrays["times"] = np.floor(table.times[kept][order]).astype(np.int64)
    return arrays | {"remarks": array_of_texts(remarks)}


def in_time_order(users: np.ndarray, times: np.ndarray | None, parts: np.ndarray | None) -> np.ndarray:
    """Positions (n,) by user, part and time; the sort is stable: what is equal keeps the order of the file."""
    return np.lexsort([key for key in (times, parts, users) if key is not None])


def _k_core(users: np.ndarray, items: np.ndarray, k: int) -> np.ndarray:
    """Positions of the interactions that stay when users and items with fewer than k are dropped until none is left."""
    kept = np.arange(len(users))
    while True:
        stays = np.ones(len(kept), bool)
        for codes in (users[kept], items[kept]):
            stays &= np.bincount(codes)[codes] >= k
        if stays.all():
            return kept
        kept = kept[stays]


def _without_gaps(codes: np.ndarray) -> np.ndarray:
    """The same order in the numbers 0, 1, ... without gaps."""
    occurs = np.bincount(codes) > 0
    return (np.cumsum(occurs) - 1)[codes]
