"""A file of interactions taken apart: who, what and when, in the order of its lines."""

import csv
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from data.csv_lines import Line, csv_lines, delimiter_of, in_order, is_number, without_point
from data.files import DataFile
from data.interactions.columns import ColumnChoice, Layout, find_layout
from data.interactions.times import EXPECTED, in_seconds, parse_times, time_range
from data.overview import overview
from data.table_files import STRICT, Reading, opened_lines
from trainer.common.errors import UserError

_ROWS_AT_ONCE = 1 << 16
"""So many lines at a time are taken apart, which bounds the memory that it takes."""
_MARKS = (",", ";", "|")
_SHOWN_WIDTH = 80
_NO_NAMES = ("na", "n/a", "#n/a", "nan", "none", "null", "-")
_FEW_TIMES, _MANY_INTERACTIONS = 100, 10
"""Fewer distinct times than the first, and for each more interactions than the second, are doubted."""


@dataclass(frozen=True)
class Table:
    """Interactions in the order of the file.

    users, items: (n,) int64, positions in user_ids and item_ids. times: (n,) int64 or float64, or None.
    user_ids, item_ids: names as they stand in the file, in order: whole numbers by value if all are, else by text.
    remarks: a short table of what was read from which column, and what else the user should know.
    """

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray | None
    user_ids: list[str]
    item_ids: list[str]
    remarks: list[str]


def read_table(file: DataFile, choice: ColumnChoice, reading: Reading = STRICT) -> Table:
    """Raises UserError, naming file, line and reason, for whatever cannot be read. choice: columns that are given."""
    with opened_lines(file, reading.encoding, _fields) as lines:
        head = list(islice(lines, 2))
        if not head:
            raise UserError(f"{file.where}: is empty; give a file of interactions")
        first, second = ([field.strip() for field in fields] for _, fields in [*head, (0, [])][:2])
        layout = find_layout(first, second, choice, f"{file.where}, line {head[0][0]}")
        return _Parser(file.where, layout).table(chain(head[layout.has_names :], lines))


def _fields(first: str, lines: Iterator[str], where: str) -> Iterator[Line]:
    """The lines that are not blank, with their fields: tabs, `::`, semicolons, commas, | or blanks separate them."""
    if "\t" not in first and "::" not in first and any(mark in first for mark in _MARKS):
        return _fields_in_quotes(lines, delimiter_of(first, _MARKS), where)
    split = _tabbed if "\t" in first else _separated_by_colons if "::" in first else str.split
    return ((i, split(line)) for i, line in enumerate(lines, start=1) if not line.isspace())


def _separated_by_colons(line: str) -> list[str]:
    return line.split("::")


def _tabbed(line: str) -> list[str]:
    """The fields of a line with tabs, quoted where all its quotes enclose fields; else they are plain characters.

    Both are common: pandas quotes, and dumps of titles such as "weird al" yankovic or 7" do not.
    """
    line = line.rstrip("\r\n")
    if '"' in line:
        try:
            return next(csv.reader([line], delimiter="\t", strict=True))
        except csv.Error:
            pass
    return line.split("\t")


def _fields_in_quotes(text: Iterable[str], delimiter: str, where: str) -> Iterator[Line]:
    """Lines of a CSV file that are not blank. Raises UserError where quotes seem to take several lines for one."""
    recent: list[str] = []

    def noted() -> Iterator[str]:
        for line in text:
            recent.append(line)
            yield line

    for number, fields in csv_lines(noted(), delimiter, where):
        lines = [line for line in recent if not line.isspace()]
        if len(lines) > 1 and all(line.count(delimiter) == len(fields) - 1 for line in lines):
            raise UserError(
                f"{where}, lines {number - len(recent) + 1} to {number}: a quote that opens on the first and closes on "
                "the last makes one interaction of them, though each has all its columns; take such quotes out, or "
                "double them"
            )
        recent.clear()
        if len(fields) > 1 or fields[0].strip():
            yield number, fields


class _Parser:
    """Takes lines of one layout apart, many at a time."""

    def __init__(self, where: str, layout: Layout) -> None:
        self._where = where
        self._layout = layout
        self._users, self._items = _Codes(), _Codes()
        self._has_dates: bool | None = None

    def table(self, lines: Iterable[Line]) -> Table:
        lines, blocks = iter(lines), []
        while some := list(islice(lines, _ROWS_AT_ONCE)):
            block = self._columns([fields for _, fields in some])
            if block is None:
                raise self._mistake(some)
            blocks.append(block)
        if not blocks:
            raise UserError(f"{self._where}: is empty but for the names of its columns; give a file of interactions")
        users, items, *columns = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        self._refuse_another_line_of_names()
        (user_ids, place_of_user), (item_ids, place_of_item) = self._users.in_order(), self._items.in_order()
        users, items = place_of_user[users], place_of_item[items]
        if len(user_ids) == 1 and user_ids[0].lower() in _NO_NAMES:
            raise UserError(
                f"{self._where}: all interactions have the user {user_ids[0]!r}, which marks a missing value; name "
                "another column by --user-column, such as one of sessions"
            )
        remarks, times, form = list(self._layout.remarks), None, ""
        if columns:
            times, form = (columns[0], "dates") if self._has_dates else in_seconds(columns[0])
            remarks += _doubts(times, len(users))
            once = _first_of_equal(users, items, times)
            if num_again := len(users) - len(once):
                remarks.append(
                    f"{num_again:,} of {len(users):,} lines have the user, item and time of another one, and count "
                    "once with it."
                )
            users, items, times = users[once], items[once], times[once]
        overview_lines = self._overview(user_ids, item_ids, times, form, len(users))
        remarks = [*overview_lines, *remarks]
        remarks += [*_unnamed("user", user_ids, users), *_unnamed("item", item_ids, items)]
        return Table(users, items, times, user_ids, item_ids, remarks)

    def _refuse_another_line_of_names(self) -> None:
        """Raises UserError where the names of the columns are a user and an item too, as in files that were joined."""
        user, item = (self._layout.names[column] for column in (self._layout.user, self._layout.item))
        if self._layout.has_names and user in self._users and item in self._items:
            raise UserError(
                f"{self._where}: the line of names, with {user} and {item}, comes again, as in files that were joined; "
                "take it out below the first line"
            )

    def _overview(
        self, user_ids: Sequence[str], item_ids: Sequence[str], times: np.ndarray | None, form: str, num: int
    ) -> list[str]:
        layout = self._layout
        found = {
            layout.user: ("user", f"{len(user_ids):,}, such as {user_ids[0]}"),
            layout.item: ("item", f"{len(item_ids):,}, such as {item_ids[0]}"),
        }
        if times is not None:
            assert layout.time is not None
            found[layout.time] = ("time", f"{time_range(times)}" + (f", from {form}" if form else ""))
        left_out = [column for column in range(len(layout.names)) if column not in found]
        rows = [(layout.names[column], *found[column]) for column in found]
        rows += [(layout.names[column], "not read", "") for column in left_out]
        return [f"Interactions: {num:,}, from these columns:", *overview(("column", "read as", "values"), rows)]

    def _columns(self, rows: list[list[str]]) -> tuple[np.ndarray, ...] | None:
        """User codes, item codes and, where there are any, times; None when a line is not as it should be."""
        layout = self._layout
        if any(length != len(layout.names) for length in map(len, rows)):
            return None
        users = self._users.of([row[layout.user].strip() for row in rows])
        items = self._items.of([row[layout.item].strip() for row in rows])
        if any(map(_is_no_name, (*self._users.newest, *self._items.newest))):
            return None
        if layout.time is None:
            return users, items
        texts = [row[layout.time] for row in rows]
        times, has_dates = parse_times(texts), not is_number(texts[0])
        if self._has_dates is None:
            self._has_dates = has_dates
        return (users, items, times) if times is not None and has_dates == self._has_dates else None

    def _mistake(self, lines: Sequence[Line]) -> UserError:
        """Says slowly and precisely what is wrong with the first wrong line."""
        layout = self._layout
        for number, unstripped in lines:
            fields, reason = [field.strip() for field in unstripped], None
            advice = "; mend it, or give another file"
            if len(fields) != len(layout.names):
                reason = f"{len(fields)} column{'s' * (len(fields) != 1)} instead of {len(layout.names)}"
            elif _is_no_name(fields[layout.user]) or _is_no_name(fields[layout.item]):
                reason = "the user or the item has no name, or one with a line break"
            elif layout.time is not None and parse_times([fields[layout.time]]) is None:
                reason = f"{_shorten(fields[layout.time])!r} is not {EXPECTED}"
                advice = "; mend it, or name another column by --time-column"
            elif layout.time is not None and is_number(fields[layout.time]) == self._has_dates:
                kind = "is a number, where those above are dates" if self._has_dates else "is a date, below numbers"
                reason = f"the time {_shorten(fields[layout.time])!r} {kind}"
                advice = "; mend it, or name another column by --time-column"
            if reason is not None:
                shown = _shorten(" ".join(fields))
                return UserError(f"{self._where}, line {number}: {shown!r}: {reason}{advice}")
        raise AssertionError("none of the lines is wrong by itself")


class _Codes(dict[str, int]):
    """Numbers names in the order of their first occurrence. newest: those that the last call of `of` brought."""

    newest: list[str]

    def __missing__(self, name: str) -> int:
        self[name] = code = len(self)
        self.newest.append(name)
        return code

    def of(self, names: Collection[str]) -> np.ndarray:
        self.newest = []
        return np.fromiter(map(self.__getitem__, names), np.int64, len(names))

    def in_order(self) -> tuple[list[str], np.ndarray]:
        """The names in the order of `data.csv_lines.in_order`, and for each code the place of its name.

        Where all names are whole numbers, 7.0 is 7: programs write so the numbers of a column with gaps.
        """
        names, whole = list(self), list(map(without_point, self))
        if all(name.isascii() and name.isdigit() for name in whole):
            names = whole
        ordered = in_order(set(names))
        place = {name: i for i, name in enumerate(ordered)}
        return ordered, np.fromiter(map(place.__getitem__, names), np.int64, len(names))


def _is_no_name(text: str) -> bool:
    return not text or "\n" in text or "\r" in text


def _first_of_equal(users: np.ndarray, items: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Positions of the interactions of which no earlier one has the same user, item and time, in order."""
    order = np.lexsort((times, items, users))  # which is stable
    is_again = np.zeros(len(order), bool)
    is_again[order[1:]] = np.all([np.diff(column[order]) == 0 for column in (users, items, times)], axis=0)
    return np.flatnonzero(~is_again)


def _unnamed(role: str, ids: Sequence[str], rows: np.ndarray) -> list[str]:
    """Warnings of names that stand for a missing one. role: user or item. rows: the place in ids of each."""
    marks = [place for place, name in enumerate(ids) if name.lower() in _NO_NAMES]
    return [
        f"Warning: {np.count_nonzero(rows == place):,} of {len(rows):,} interactions have the {role} {ids[place]!r}, "
        f"which often marks a missing value; leave these lines out, or name another column by --{role}-column."
        for place in marks
    ]


def _doubts(times: np.ndarray, num_interactions: int) -> list[str]:
    num_distinct = len(np.unique(times))
    num_seconds = num_distinct if times.dtype.kind == "i" else len(np.unique(np.floor(times)))
    if 2 * num_seconds < num_distinct:
        return [
            f"Warning: {num_distinct:,} distinct times are {num_seconds:,} in whole seconds, which is what intervals "
            "and --split time are told by; fractions count for the order alone. Give times in seconds."
        ]
    if num_distinct >= _FEW_TIMES or num_interactions <= _MANY_INTERACTIONS * num_distinct:
        return []
    return [
        f"Warning: the {num_interactions:,} interactions have {num_distinct} distinct "
        f"time{'s' * (num_distinct > 1)}: is that column the time? "
        "Name another by --time-column. Interactions of one time keep the order of the file."
    ]


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_WIDTH else text[: _SHOWN_WIDTH - 3] + "..."
