"""Who interacted with what, when: reads the files in which recommendation data is usually published.

A file has one interaction a line: `user item`, `user item time` or `user item rating time`, with or without a line of
column names, separated by tabs, `::`, commas or spaces.
"""

import hashlib
import io
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import DataFile, Folder, Source, shown, source_at
from trainer.loading.cache import Arrays, cached_arrays
from trainer.loading.errors import BadInput

_FORMAT_VERSION = 1
_KNOWN_NAMES = ("ratings.dat", "u.data", "ratings.csv")
_SUFFIXES = (".txt", ".csv", ".tsv", ".dat", ".inter")
_SEPARATORS = ("\t", "::", ",")
_USER_COLUMN = re.compile(r"u(ser)?[ _-]?(id)?(:token)?", re.IGNORECASE)
_BLOCK_CHARACTERS = 1 << 20
"""So much text at a time is taken apart, which bounds the memory that it takes."""
_TIME_LIMIT = 2**62
"""Differences of smaller times fit into int64."""
_SHOWN_WIDTH = 80


@dataclass(frozen=True)
class Interactions:
    """Interactions by user, each user's in time order; equal times keep the order of the file.

    offsets: (num_users + 1,) int64; those of user u are at offsets[u] to offsets[u + 1].
    items: (n,) int32, 1..num_items; 0 is left for padding.
    times: (n,) int64 seconds, or None where the source has none.
    num_items: size of the catalogue.
    key: names the content in the cache.
    """

    offsets: np.ndarray
    items: np.ndarray
    times: np.ndarray | None
    num_items: int
    key: str

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1


def load_interactions(path: Path, k_core: int, cache_dir: Path) -> Interactions:
    """Reads interactions and keeps them parsed in the cache.

    Users and items are any text without separators. They are numbered in the order of their names, those that
    are whole numbers by value. Repeated interactions stay: people buy again.

    path: a text file, plain or `.gz`; or a folder, `.zip` or `.tar.gz` with exactly one file that can be meant:
        `ratings.dat`, `u.data` or `ratings.csv`, else the only one that ends in .txt, .csv, .tsv, .dat or .inter.
        Archives are read in memory; nothing is unpacked to disk.
    k_core: users and items with fewer interactions are dropped, until there are none; 1 or less keeps all.

    A third of three columns, or fourth of four, is the time in seconds, whole or not. With two columns the order of
    the file is the order in time.

    Raises BadInput when the file is not there, cannot be chosen, is damaged or has a line that cannot be read, or when
    the k-core is empty.
    """
    file = _find(path)
    k_core = max(k_core, 1)
    identity = repr((_FORMAT_VERSION, file.stamp, k_core))
    key = f"interactions-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    arrays = cached_arrays(cache_dir, key, lambda: _build(file, k_core))
    return Interactions(arrays["offsets"], arrays["items"], arrays.get("times"), int(arrays["num_items"]), key)


def _find(path: Path) -> DataFile:
    path = path.resolve()
    source = source_at(path, depth=1, advice="give a file of interactions")
    return DataFile(Folder(path.parent), path.name) if source is None else _choose(source)


def _choose(source: Source) -> DataFile:
    """The one of the files that can be meant."""
    candidates = [file for file in source.files if file.bare_name in _KNOWN_NAMES] or [
        file for file in source.files if file.bare_name.endswith(_SUFFIXES) and not file.bare_name.startswith("readme")
    ]
    if len(candidates) != 1:
        raise BadInput(
            f"{source.where}: {len(candidates)} files in it can be the interactions, where one is needed; "
            f"give the file itself; there are: {shown(file.name for file in source.files)}"
        )
    return candidates[0]


@dataclass
class _Table:
    """Lines in the order of the file: codes (n,) int64 of users and items; times (n,), or None."""

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray | None


def _build(file: DataFile, k_core: int) -> Arrays:
    table = _parse(file)
    kept = _k_core(table.users, table.items, k_core)
    if not len(kept):
        raise BadInput(
            f"--k-core {k_core}: nothing of {file.where} is left when users and items with fewer than {k_core} "
            "interactions are dropped; choose a smaller number"
        )
    users, items = (_without_gaps(codes[kept]) for codes in (table.users, table.items))
    # Both sorts are stable: what is equal keeps the order of the file.
    order = np.argsort(users, kind="stable") if table.times is None else np.lexsort((table.times[kept], users))
    arrays = {
        "offsets": np.concatenate([[0], np.cumsum(np.bincount(users))]),
        "items": (items[order] + 1).astype(np.int32),
        "num_items": np.array(items.max() + 1),
    }
    if table.times is not None:
        # Fractions of a second count for the order only.
        arrays["times"] = np.floor(table.times[kept][order]).astype(np.int64)
    return arrays


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


def _parse(file: DataFile) -> _Table:
    parser = _Parser(file.where)
    try:
        with file.open() as content, io.TextIOWrapper(content, encoding="utf-8-sig") as text:
            while lines := text.readlines(_BLOCK_CHARACTERS):
                parser.add(lines)
    except UnicodeDecodeError as error:
        reason = f"is not text in UTF-8 ({error.reason}); convert it, or give another file"
        raise BadInput(f"{file.where}: {reason}") from None
    return parser.table()


class _Parser:
    """Takes the lines of one file apart, a block at a time."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._separator: str | None = None
        self._num_columns = 0
        self._num_lines = 0
        self._users, self._items = _Codes(), _Codes()
        self._blocks: list[tuple[np.ndarray, ...]] = []

    def add(self, lines: list[str]) -> None:
        if not self._num_columns:
            self._detect(lines)
        rows = [line.split(self._separator) for line in lines if not line.isspace()]
        columns = self._columns(rows)
        if columns is None:
            raise self._mistake(lines)
        self._blocks.append(columns)
        self._num_lines += len(lines)

    def table(self) -> _Table:
        columns = [np.concatenate(blocks) for blocks in zip(*self._blocks, strict=True)]
        if not columns or not len(columns[0]):
            raise BadInput(f"{self._where}: is empty; give a file of interactions")
        users, items = self._users.ranks()[columns[0]], self._items.ranks()[columns[1]]
        return _Table(users, items, columns[2] if len(columns) == 3 else None)

    def _detect(self, lines: list[str]) -> None:
        """Learns the format from the first line that is not blank, and blanks it if it holds column names."""
        row = next((row for row, line in enumerate(lines) if not line.isspace()), None)
        if row is None:
            return
        self._separator = next((separator for separator in _SEPARATORS if separator in lines[row]), None)
        fields = [field.strip() for field in lines[row].split(self._separator)]
        self._num_columns = len(fields)
        if self._num_columns not in (2, 3, 4):
            raise self._mistake(lines)
        if _are_column_names(fields):
            if any(_USER_COLUMN.fullmatch(name) for name in fields[1:]) or fields[-1].lower().startswith("rating"):
                raise self._bad_line(row, lines[row], "the columns are not in the order user, item, rating, time")
            lines[row] = "\n"

    def _columns(self, rows: list[list[str]]) -> tuple[np.ndarray, ...] | None:
        """User codes, item codes and, where there are any, times; None when a line is not as it should be."""
        if any(length != self._num_columns for length in map(len, rows)):
            return None
        users = self._users.of([row[0].strip() for row in rows])
        items = self._items.of([row[1].strip() for row in rows])
        if "" in self._users or "" in self._items:
            return None
        if self._num_columns <= 2:
            return users, items
        times = _parse_times([row[-1] for row in rows])
        return None if times is None else (users, items, times)

    def _mistake(self, lines: list[str]) -> BadInput:
        """Says slowly and precisely what is wrong with the first wrong line."""
        for row, line in enumerate(lines):
            fields = line.split(self._separator)
            if line.isspace():
                continue
            if self._num_columns not in (2, 3, 4):
                reason = "not `user item`, `user item time` or `user item rating time`"
                return self._bad_line(row, line, f"{_columns(fields)}, {reason}")
            if len(fields) != self._num_columns:
                return self._bad_line(row, line, f"{_columns(fields)} instead of {self._num_columns}")
            if not fields[0].strip() or not fields[1].strip():
                return self._bad_line(row, line, "the user or the item has no name")
            if self._num_columns > 2 and _parse_times(fields[-1:]) is None:
                return self._bad_line(row, line, f"{_shorten(fields[-1])!r} is not a time in seconds")
        raise AssertionError("no line is wrong")

    def _bad_line(self, row: int, line: str, reason: str) -> BadInput:
        number = self._num_lines + row + 1
        return BadInput(f"{self._where}, line {number}: {_shorten(line)!r}: {reason}; mend it, or give another file")


class _Codes(dict[str, int]):
    """Numbers names in the order of their first occurrence."""

    def __missing__(self, name: str) -> int:
        self[name] = code = len(self)
        return code

    def of(self, names: Collection[str]) -> np.ndarray:
        return np.fromiter(map(self.__getitem__, names), np.int64, len(names))

    def ranks(self) -> np.ndarray:
        """The position of each code's name among the sorted names: whole numbers by value if all are, else text."""
        if all(name.isascii() and name.isdigit() for name in self):
            ordered = sorted(self, key=_numeric_order)
        else:
            ordered = sorted(self)
        ranks = np.empty(len(self), np.int64)
        ranks[self.of(ordered)] = np.arange(len(self))
        return ranks


def _numeric_order(digits: str) -> tuple[int, str, str]:
    # Not int(digits), which refuses numbers of thousands of digits.
    significant = digits.lstrip("0")
    return len(significant), significant, digits


def _are_column_names(fields: list[str]) -> bool:
    if len(fields) == 2:
        # Names of users and items are no numbers either.
        return any(_USER_COLUMN.fullmatch(field) for field in fields)
    return all(_parse_times([field]) is None for field in fields)


def _parse_times(texts: list[str]) -> np.ndarray | None:
    """(n,) int64, or float64 where not all are whole numbers; None when one is no time."""
    try:
        times = np.fromiter(map(int, texts), np.int64, len(texts))
    except (ValueError, OverflowError):
        try:
            times = np.fromiter(map(float, texts), np.float64, len(texts))
        except ValueError:
            return None
    usable = (times > -_TIME_LIMIT) & (times < _TIME_LIMIT)  # false for NaN
    return times if usable.all() else None


def _columns(fields: list[str]) -> str:
    return f"{len(fields)} column{'s' * (len(fields) != 1)}"


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN_WIDTH else text[: _SHOWN_WIDTH - 3] + "..."
