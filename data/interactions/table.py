"""Parses files of interactions into users, items and times, in the order of lines."""

import csv
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from data.csv_lines import Line, csv_lines, delimiter_of, in_order, without_points
from data.files import DataFile
from data.interactions.columns import ColumnChoice, Layout, find_layout
from data.interactions.times import EXPECTED, form_of, in_seconds, parse_times, time_range
from data.overview import overview
from data.table_files import STRICT, LeftOut, Reading, opened_lines
from trainer.common.errors import UserError

_ROWS_AT_ONCE = 1 << 16
"""Number of lines parsed at a time, to limit memory."""
_MARKS = (",", ";", "|")
_SHOWN_WIDTH = 80
_NO_NAMES = ("na", "n/a", "#n/a", "nan", "none", "null", "-")
_FEW_TIMES, _MANY_INTERACTIONS = 100, 10
"""Fewer than _FEW_TIMES distinct times, with more than _MANY_INTERACTIONS interactions per time, cause a warning."""


@dataclass(frozen=True)
class Table:
    """Interactions in the order of the files.

    users, items: (n,) int64, indices into user_ids and item_ids. times: (n,) int64 or float64; None without times.
    parts: (n,) int64, index of the file. user_ids, item_ids: names in the files, sorted by value if all are whole
    numbers, otherwise as text. remarks: lines to print: a short table of the columns, and warnings.
    """

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray | None
    parts: np.ndarray
    user_ids: list[str]
    item_ids: list[str]
    remarks: list[str]


def read_table(files: Sequence[DataFile], choice: ColumnChoice, reading: Reading = STRICT) -> Table:
    """Reads files with the same layout. choice: columns chosen by flags.

    Raises UserError with file, line and reason for unreadable content.
    """
    parser, left_out = None, LeftOut(reading)
    for file in files:
        with opened_lines(file, left_out, _fields) as lines:
            head = list(islice(lines, 2))
            if not head:
                raise UserError(f"{file.where}: is empty; give a file of interactions")
            first, second = ([field.strip() for field in fields] for _, fields in [*head, (0, [])][:2])
            layout = find_layout(first, second, choice, f"{file.where}, line {head[0][0]}")
            parser = parser or _Parser(layout, left_out)
            parser.add(chain(head[layout.has_names :], lines), layout, file.where)
    assert parser is not None
    return parser.table()


def _fields(first: str, lines: Iterator[str], where: str) -> Iterator[Line]:
    """Yields the fields of non-blank lines, separated by tabs, `::`, semicolons, commas, | or blanks."""
    if "\t" not in first and "::" not in first and any(mark in first for mark in _MARKS):
        return _fields_in_quotes(lines, delimiter_of(first, _MARKS), where)
    split = _tabbed if "\t" in first else _separated_by_colons if "::" in first else str.split
    return ((i, split(line)) for i, line in enumerate(lines, start=1) if not line.isspace())


def _separated_by_colons(line: str) -> list[str]:
    return line.split("::")


def _tabbed(line: str) -> list[str]:
    """Splits a line at tabs, and removes quotation marks that enclose whole fields.

    A field such as `"weird al" yankovic` shows that quotation marks are plain text; then the line keeps all of them.
    """
    line = line.rstrip("\r\n")
    if '"' in line:
        try:
            return next(csv.reader([line], delimiter="\t", strict=True))
        except csv.Error:
            pass
    return line.split("\t")


def _fields_in_quotes(text: Iterable[str], delimiter: str, where: str) -> Iterator[Line]:
    """Yields the fields of a CSV file's non-blank lines. Raises UserError if a quote seems to merge several lines."""
    recent: list[str] = []

    def noted() -> Iterator[str]:
        for line in text:
            recent.append(line)
            yield line

    for number, fields in csv_lines(noted(), delimiter, where):
        lines = [line for line in recent if not line.isspace()]
        if len(lines) > 1 and all(line.count(delimiter) == len(fields) - 1 for line in lines):
            raise UserError(
                f"{where}, lines {number - len(recent) + 1} to {number}: each line has all columns, but a quoted value "
                "that begins on the first line and ends on the last joins them into one interaction; remove the "
                "quotation marks, or double them"
            )
        recent.clear()
        if len(fields) > 1 or fields[0].strip():
            yield number, fields


class _Parser:
    def __init__(self, layout: Layout, left_out: LeftOut) -> None:
        self._layout, self._left_out = layout, left_out
        self._users, self._items = _Codes(), _Codes()
        self._form_of_times = ""
        self._blocks: list[tuple[np.ndarray, ...]] = []
        self._wheres: list[str] = []

    def add(self, lines: Iterable[Line], layout: Layout, where: str) -> None:
        if layout.names != self._layout.names:
            raise UserError(f"{where}: has different columns from {self._wheres[0]}; give files with the same columns")
        self._wheres.append(where)
        lines, num_before = iter(lines), len(self._blocks)
        while some := list(islice(lines, _ROWS_AT_ONCE)):
            block = self._columns([fields for _, fields in some])
            if block is None and (some := self._without_bad(some)):
                block = self._columns([fields for _, fields in some])
            if block is not None:
                self._blocks.append((*block, np.full(len(some), len(self._wheres) - 1)))
        if len(self._blocks) == num_before:
            raise UserError(f"{where}: has only a line of column names; give a file with interactions")

    def table(self) -> Table:
        users, items, *columns, parts = (np.concatenate(blocks) for blocks in zip(*self._blocks, strict=True))
        self._refuse_another_line_of_names()
        (user_ids, place_of_user), (item_ids, place_of_item) = self._users.in_order(), self._items.in_order()
        users, items = place_of_user[users], place_of_item[items]
        if len(user_ids) == 1 and user_ids[0].lower() in _NO_NAMES:
            raise UserError(
                f"{self._where}: all interactions have the user {user_ids[0]!r}, which marks a missing value; choose "
                "another column with --user-column, such as session ids"
            )
        remarks, times, form = [*self._layout.remarks, *self._left_out.remarks()], None, ""
        if columns:
            try:
                times, form = (columns[0], "dates") if "ISO" in self._form_of_times else in_seconds(columns[0])
            except ValueError as error:
                raise UserError(f"{self._where}: {error}") from None
            remarks += _doubts(times, len(users))
            once = _first_of_equal(users, items, times)
            if num_again := len(users) - len(once):
                remarks.append(
                    f"{num_again:,} of {len(users):,} lines are dropped, because they repeat the user, item and time "
                    "of another line."
                )
            users, items, times, parts = users[once], items[once], times[once], parts[once]
        overview_lines = self._overview(user_ids, item_ids, times, form, len(users))
        remarks = [*overview_lines, *remarks]
        remarks += [*_unnamed("user", user_ids, users), *_unnamed("item", item_ids, items)]
        return Table(users, items, times, parts, user_ids, item_ids, remarks)

    @property
    def _where(self) -> str:
        return self._wheres[-1]

    def _refuse_another_line_of_names(self) -> None:
        """Raises UserError if names in the header also occur as a user and an item, as in concatenated files."""
        user, item = (self._layout.names[column] for column in (self._layout.user, self._layout.item))
        if self._layout.has_names and user in self._users and item in self._items:
            raise UserError(
                f"{self._where}: the line of column names, with {user} and {item}, occurs again; keep only the first"
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
        """Returns codes of users, codes of items and, if present, times; None if a line is malformed."""
        layout = self._layout
        if any(length != len(layout.names) for length in map(len, rows)):
            return None
        users = self._users.of([row[layout.user].strip() for row in rows])
        items = self._items.of([row[layout.item].strip() for row in rows])
        times = None if layout.time is None else parse_times([row[layout.time] for row in rows])
        is_bad = any(map(_is_no_name, (*self._users.newest, *self._items.newest)))
        if layout.time is not None and not is_bad:
            form = form_of(rows[0][layout.time])
            self._form_of_times = self._form_of_times or form
            is_bad = times is None or form != self._form_of_times
        if is_bad:  # names in dropped lines get no codes
            self._users.forget_newest()
            self._items.forget_newest()
            return None
        return (users, items) if times is None else (users, items, times)

    def _without_bad(self, lines: Sequence[Line]) -> list[Line]:
        """Returns the well-formed lines. Without --on-bad drop, raises UserError for the first malformed line."""
        kept = []
        for number, fields in lines:
            if (wrong := self._what_is_wrong([field.strip() for field in fields])) is None:
                kept.append((number, fields))
                continue
            reason, advice = wrong
            shown = f"{self._where}, line {number}: {_shorten(' '.join(map(str.strip, fields)))!r}: {reason}"
            self._left_out.add(shown, f"{shown}; {advice}, or skip unreadable lines with --on-bad drop")
        return kept

    def _what_is_wrong(self, fields: Sequence[str]) -> tuple[str, str] | None:
        """Returns the error in a line and how to fix it; None if the line is well-formed."""
        layout, advice = self._layout, "fix it"
        if len(fields) != len(layout.names):
            return f"has {len(fields)} column{'s' * (len(fields) != 1)} instead of {len(layout.names)}", advice
        if _is_no_name(fields[layout.user]) or _is_no_name(fields[layout.item]):
            return "the user or item is empty or contains a line break", advice
        if layout.time is None:
            return None
        text, advice = fields[layout.time], "fix it, or choose another column with --time-column"
        form = form_of(text) if parse_times([text]) is not None else ""
        if not form:
            return f"{_shorten(text)!r} is not {EXPECTED}", advice
        self._form_of_times = self._form_of_times or form
        if form != self._form_of_times:
            return f"the time {_shorten(text)!r} is {form}, but earlier times are {self._form_of_times}", advice
        return None


class _Codes(dict[str, int]):
    """Maps names to codes, in order of first occurrence. newest: names that the last call of `of` added."""

    newest: list[str]

    def __missing__(self, name: str) -> int:
        self[name] = code = len(self)
        self.newest.append(name)
        return code

    def of(self, names: Collection[str]) -> np.ndarray:
        self.newest = []
        return np.fromiter(map(self.__getitem__, names), np.int64, len(names))

    def forget_newest(self) -> None:
        for name in self.newest:
            del self[name]

    def in_order(self) -> tuple[list[str], np.ndarray]:
        """Returns the names, sorted by `data.csv_lines.in_order`, and each code's index among the sorted names."""
        names = without_points(list(self))
        ordered = in_order(set(names))
        place = {name: i for i, name in enumerate(ordered)}
        return ordered, np.fromiter(map(place.__getitem__, names), np.int64, len(names))


def _is_no_name(text: str) -> bool:
    return not text or "\n" in text or "\r" in text


def _first_of_equal(users: np.ndarray, items: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the indices of interactions that do not repeat an earlier interaction's user, item and time."""
    order = np.lexsort((times, items, users))  # a stable sort
    is_again = np.zeros(len(order), bool)
    is_again[order[1:]] = np.all([np.diff(column[order]) == 0 for column in (users, items, times)], axis=0)
    return np.flatnonzero(~is_again)


def _unnamed(role: str, ids: Sequence[str], rows: np.ndarray) -> list[str]:
    """Returns warnings about names that mark missing values. role: "user" or "item". rows: indices into ids."""
    marks = [place for place, name in enumerate(ids) if name.lower() in _NO_NAMES]
    return [
        f"Warning: {np.count_nonzero(rows == place):,} of {len(rows):,} interactions have the {role} {ids[place]!r}, "
        f"which often marks a missing value; remove these lines, or choose another column with --{role}-column."
        for place in marks
    ]


def _doubts(times: np.ndarray, num_interactions: int) -> list[str]:
    num_distinct = len(np.unique(times))
    num_seconds = num_distinct if times.dtype.kind == "i" else len(np.unique(np.floor(times)))
    if 2 * num_seconds < num_distinct:
        return [
            f"Warning: {num_distinct:,} distinct times become {num_seconds:,}, because intervals and --split time use "
            "whole seconds; fractions affect only the order. Give times in seconds."
        ]
    if num_distinct >= _FEW_TIMES or num_interactions <= _MANY_INTERACTIONS * num_distinct:
        return []
    return [
        f"Warning: the {num_interactions:,} interactions have {num_distinct} distinct time{'s' * (num_distinct > 1)}: "
        "check that this is the time column, or choose another with --time-column. Interactions with equal times "
        "keep the order of the file."
    ]


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_WIDTH else text[: _SHOWN_WIDTH - 3] + "..."
