"""Reads files of interactions between users and items."""

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
    """Interactions, sorted by user and time; ties keep file order.

    offsets: (num_users + 1,) int64; user u has items[offsets[u] : offsets[u + 1]].
    items: (n,) int32, from 1 to num_items; 0 is padding.
    times: (n,) int64, in seconds; None without times.
    held_out: (num_users, 2) int64, how many of each user's last interactions are for validation and for the test, if
        files determine the split; otherwise None.
    key: identifies the content in the cache.
    item_ids: (num_items,), names of items 1, 2, ... in the files. remarks: lines to print.
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
    """Reads interactions; the parsed arrays are cached.

    A file has one interaction per line. Tabs, `::`, semicolons, commas, | or blanks separate the columns; `find_layout`
    detects what these contain. Fields may be quoted unless `::` or blanks separate them. JSON lines and parquet are
    supported too. Users and items may have any names and are numbered in order of names, or by value if all are whole
    numbers. Repeated interactions are kept, but lines with equal user, item and time count once. Without times, file
    order is time order.

    path: a file, plain or compressed with gzip, bzip2 or xz; or a folder, `.zip` or `.tar.gz` with one of these, of
    which the first is read: `ratings.dat`, `u.data` or `ratings.csv`; training, validation and test files with the same
    columns (`parts_of`); a single table (`TABLES`). k_core: repeatedly drops users and items with fewer than k_core
    interactions; 1 or less keeps all.

    Raises UserError if the file is missing, ambiguous or damaged, has an unreadable line or unknown columns, or if the
    k-core is empty.
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
    """Finds the file of interactions at a path, or the files for training, validation (optional) and test.

    flag: command-line flag that sets the path. Raises UserError if there is no such file, or if it is unclear which
    file to read.
    """
    path = Path(os.path.realpath(path))  # unlike Path.resolve, does not raise for a link to itself
    return tables_at(path, flag, "give a file of interactions", _KNOWN_NAMES)


def _build(files: Sequence[DataFile], k_core: int, columns: ColumnChoice, reading: Reading) -> Arrays:
    table = read_table(files, columns, reading)
    kept = _k_core(table.users, table.items, k_core)
    if not len(kept):
        raise UserError(
            f"--k-core {k_core}: no interaction in {files[0].where} remains after dropping users and items with fewer "
            f"than {k_core} interactions; choose a smaller number"
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
        # without a validation file, each user's last training interaction is for validation
        held_out = of_parts[1:] if len(files) == 3 else [(of_parts[0] > 1).astype(np.int64), of_parts[1]]
        arrays["held_out"] = np.stack(held_out, axis=1)
        counts = ", ".join(f"{count.sum():,} of {file.name}" for count, file in zip(of_parts, files, strict=True))
        remarks.append(f"The files define the held-out interactions: {counts}.")
    if table.times is not None:
        # fractions of a second affect only the order
        arrays["times"] = np.floor(table.times[kept][order]).astype(np.int64)
    return arrays | {"remarks": array_of_texts(remarks)}


def in_time_order(users: np.ndarray, times: np.ndarray | None, parts: np.ndarray | None) -> np.ndarray:
    """Returns indices (n,) that sort interactions by user, part (index of the file) and time; ties keep file order."""
    return np.lexsort([key for key in (times, parts, users) if key is not None])


def _k_core(users: np.ndarray, items: np.ndarray, k: int) -> np.ndarray:
    """Repeatedly drops users and items with fewer than k interactions; returns indices of remaining interactions."""
    kept = np.arange(len(users))
    while True:
        stays = np.ones(len(kept), bool)
        for codes in (users[kept], items[kept]):
            stays &= np.bincount(codes)[codes] >= k
        if stays.all():
            return kept
        kept = kept[stays]


def _without_gaps(codes: np.ndarray) -> np.ndarray:
    """Renumbers codes to 0, 1, ... without gaps, in the same order."""
    occurs = np.bincount(codes) > 0
    return (np.cumsum(occurs) - 1)[codes]
