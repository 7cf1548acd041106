"""Reads rows of recordings from tables, and classifies the columns."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, islice, pairwise
from typing import NamedTuple

import numpy as np

from data.csv_lines import CsvTable, Line, is_number, plain_name, without_point
from data.har.clocks import are_out_of_order, is_clock, rate_and_gaps
from data.har.windows import SIGNALS
from data.moments import moments_of, settled
from data.table_files import LeftOut
from data.tabular.table import MISSING
from trainer.common.errors import UserError

SUBJECTS = ("subject", "person", "participant", "user", "volunteer")
LABELS = ("label", "activity", "class")
TRIALS = ("trial", "session")
"""Names of columns; where such a column changes, a new recording starts."""
_OF_ROWS = ("index", "row", "sample", "unnamed0", "", "id")
_SLOW = {"battery", "latitude", "longitude", "gps", "accuracy", "pedometer"}
"""Words in names of columns that describe a place or a device instead of motion."""
_SLOW_NAMES = {"lat", "lon", "lng", "steps", "step count", "step counter", "step counts"}
"""Full names, without units, of other columns that do not measure motion."""

ROWS_AT_ONCE = 4096
_LONGEST_HOLE = 25
"""Largest number of consecutive missing cells to fill in; a longer gap splits a recording."""
_BAD_ROWS = "unreadable rows, at which recordings are divided"
LARGEST = 1e15
"""Largest absolute value of a signal; larger values are invalid."""
_NUM_SHOWN = 30


@dataclass(frozen=True)
class Roles:
    """Indices, from 0, of columns that are not signals. subject and label are None if absent."""

    subject: int | None
    label: int | None
    trials: tuple[int, ...]
    clocks: tuple[int, ...]

    @property
    def columns(self) -> list[int]:
        return [i for i in (self.subject, self.label, *self.trials, *self.clocks) if i is not None]


class Recording(NamedTuple):
    """Continuous recording: rows `start` to `stop - 1` of a file. rate_hz: rows per second; None if no clock is usable.

    is_behind_gap: whether time is missing just before the first row.
    """

    start: int
    stop: int
    rate_hz: float | None
    is_behind_gap: bool


@dataclass
class Rows:
    """Rows of a file: signals (n, C) float32, subjects, labels and clocks (columns of times).

    subjects, labels: a normalised name per row (see `key_of_name`), "" if missing. spellings: how often each subject
    and each label occurs, as spelled in the file.
    trials: each row's cells in the columns that separate recordings.
    clocks: (n, K) float64; NaN if a cell is not a time. in_seconds: (K,) bool, whether a clock is in seconds.
    moments: maps each clock's name to its first and last cell. unread: maps a clock's name to why it cannot be read.
    places: (n,) int64, each row's index in the file.
    """

    signals: np.ndarray
    subjects: list[str]
    labels: list[str]
    spellings: tuple[Counter[str], Counter[str]]
    trials: list[tuple[str, ...]]
    clocks: np.ndarray
    in_seconds: np.ndarray
    moments: dict[str, tuple[str, str]]
    unread: dict[str, str]
    places: np.ndarray

    def without_holes(self, left_out: LeftOut, first: str, needs_subject: bool) -> "Rows":
        """Removes rows with missing values and divides recordings there; --on-bad interpolate first fills short gaps.

        left_out: counts dropped rows and filled cells. first: description of the first unreadable cell.
        """
        num_filled, start = 0, 0
        fills = left_out.reading.on_bad == "interpolate"
        for _, run in groupby(zip(self.subjects, self.trials, strict=True)) if fills else ():
            stop = start + sum(1 for _ in run)
            num_filled += sum(_fill(self.signals[start:stop, k]) for k in range(self.signals.shape[1]))
            start = stop
        is_kept = np.isfinite(self.signals).all(axis=1)
        if needs_subject and "" in self.subjects:
            is_kept &= np.array(self.subjects, dtype=str) != ""
            first = first or f"data row {self.places[self.subjects.index('')] + 1}, which has no subject"
        left_out.count(_BAD_ROWS, first, int((~is_kept).sum()))
        left_out.count("values that were not numbers", first, num_filled, "Interpolated")
        kept, places = np.flatnonzero(is_kept).tolist(), self.places[is_kept]
        stretches = np.cumsum(np.diff(places, prepend=places[:1]) > 1).tolist()
        return replace(
            self,
            signals=self.signals[is_kept],
            subjects=[self.subjects[k] for k in kept],
            labels=[self.labels[k] for k in kept],
            trials=[(*self.trials[k], str(stretch)) for k, stretch in zip(kept, stretches, strict=True)],
            clocks=self.clocks[is_kept],
            places=places,
        )

    def recordings(self, by_label: bool) -> Iterator["Recording"]:
        """Yields the recordings in order.

        A recording starts where the subject or trial changes and where the clock jumps. With by_label, a recording also
        starts where the label changes, and rows without a label are dropped.
        """
        labels = self.labels if by_label else [""] * len(self.signals)
        start = 0
        for (_, label, _), run in groupby(zip(self.subjects, labels, self.trials, strict=True)):
            stop = start + sum(1 for _ in run)
            if label or not by_label:
                rate_hz, gaps = rate_and_gaps(self.clocks[start:stop], self.in_seconds)
                for first, last in pairwise([start, *(start + gaps).tolist(), stop]):
                    yield Recording(first, last, rate_hz, first > start)
            start = stop


def key_of_name(text: str) -> str:
    """Normalises a name: 1, 01 and 1.0 become equal, as do yes and YES; marks of missing values, such as NA, become "".

    Single letters keep their case.
    """
    text = " ".join(text.split())
    if text in MISSING:
        return ""
    text = without_point(text.casefold() if len(text) > 1 else text)
    return text.lstrip("0") or "0" if text.isascii() and text.isdigit() else text


def roles_of(
    header: Sequence[str], channels: Sequence[str], subject: int | None, label: int | None, clocks: Sequence[str] = ()
) -> Roles:
    """Finds columns of trials and times (clocks) by name. clocks: names of additional columns of times."""
    others = [i for i, name in enumerate(header) if name not in channels and i not in (subject, label)]
    trials = tuple(i for i in others if plain_name(header[i]) in TRIALS)
    moments = (i for i in others if i not in trials and (header[i] in clocks or is_clock(header[i])))
    return Roles(subject, label, trials, tuple(moments))


def usual_column(header: Sequence[str], names: Sequence[str], chosen: str | None = None) -> int | None:
    """Returns the index of column `chosen` or, if that is None, of a column with one of `names`.

    Returns None if no column matches. A match that differs only in case takes precedence over a match by `plain_name`.
    """
    if chosen is not None:
        return header.index(chosen) if chosen in header else None
    for written in ([name.lower() for name in header], [plain_name(name) for name in header]):
        for name in names:
            if name in written:
                return written.index(name)
    return None


def why_no_signal(name: str, column: int, lines: Sequence[Line]) -> str:
    """Returns why a column is not a signal, judged by its name or first rows; "" if it may be a signal."""
    if plain_name(name) in (*SUBJECTS, *LABELS, *_OF_ROWS):
        return "its name suggests a row number, a person or an activity"
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", re.sub(r"[(\[].*", "", name)).lower())
    if _SLOW & set(words) or " ".join(words) in _SLOW_NAMES:
        return "its name suggests a place or a device, not a motion signal"
    texts = [text for _, fields in lines if len(fields) > column and (text := fields[column].strip()) not in MISSING]
    if texts and not any(re.match(r"[+-]?[.,]?\d", text) or is_number(text) for text in texts):
        return f"text, such as {texts[0][:_NUM_SHOWN]!r}"
    return ""


def _fill(column: np.ndarray) -> int:
    """Interpolates short gaps between numbers of a column (n,) in place; returns the number of filled cells."""
    known, missing = np.flatnonzero(np.isfinite(column)), np.flatnonzero(~np.isfinite(column))
    after = np.searchsorted(known, missing)
    is_inside = (after > 0) & (after < len(known))
    missing, after = missing[is_inside], after[is_inside]
    missing = missing[known[after] - known[after - 1] - 1 <= _LONGEST_HOLE]
    if len(missing):
        column[missing] = np.interp(missing, known, column[known])
    return len(missing)


def read_rows(
    table: CsvTable, channels: Sequence[str], roles: Roles, where: str, advice: str, left_out: LeftOut,
    needs_subject: bool = False,
) -> Rows:  # fmt: skip
    """Reads all rows of an opened table. advice: end of messages on cells that are not numbers.

    left_out: says how to treat unreadable rows, and counts them. needs_subject: whether rows without a subject count as
    unreadable. Raises UserError, with the line, for missing columns and, with `--on-bad refuse`, for unreadable rows.
    """
    header, decimal_comma = table.header, table.decimal_comma
    columns = signal_columns(header, channels, f"{where}, line {table.line}")
    _refuse_repeated([header[column] for column in roles.columns], header, f"{where}, line {table.line}")
    clocks = _Clocks([header[column] for column in roles.clocks], roles.clocks, decimal_comma)
    signals: list[np.ndarray] = [np.empty((0, len(columns)), np.float32)]
    keys: tuple[list[str], list[str]] = ([], [])
    spellings: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    key_of = lru_cache(maxsize=1 << 16)(key_of_name)
    trials: list[tuple[str, ...]] = []
    places, first_bad, num_rows = [np.empty(0, np.int64)], "", 0
    while some := list(islice(table.lines, ROWS_AT_ONCE)):
        kept = [k for k, (_, fields) in enumerate(some) if len(fields) == len(header)]
        whole = [some[k] for k in kept]
        signals.append(_numbers(whole, columns, decimal_comma))
        if len(kept) < len(some) or not np.isfinite(signals[-1]).all():
            wrong, fix = _what_is_wrong(some, header, columns, decimal_comma)
            if left_out.reading.on_bad == "refuse":
                raise UserError(f"{where}, {wrong}; {fix or advice}")
            first_bad = first_bad or f"{where}, {wrong}"
            left_out.count(_BAD_ROWS, first_bad, len(some) - len(kept))
        places.append(num_rows + np.array(kept, np.int64))
        num_rows += len(some)
        clocks.add(whole)
        for k, column in enumerate((roles.subject, roles.label)):
            texts = [""] * len(whole) if column is None else [fields[column].strip() for _, fields in whole]
            spellings[k].update(texts)
            keys[k].extend(map(key_of, texts))
        trials += [tuple(fields[column].strip() for column in roles.trials) for _, fields in whole]
    times = clocks.settle()
    is_same = [before == row for before, row in pairwise(zip(keys[0], trials, strict=True))]
    if are_out_of_order(np.diff(times, axis=0)[is_same]):
        raise UserError(
            f"{where}: the clock ({', '.join(clocks.names)}) often goes back from one row to the next; sort the rows "
            "by time, or remove the clock column if it is wrong"
        )
    rows = Rows(
        np.concatenate(signals), *keys, spellings, trials, times, clocks.in_seconds, clocks.moments, clocks.unread,
        np.concatenate(places),
    )  # fmt: skip
    return rows if left_out.reading.on_bad == "refuse" else rows.without_holes(left_out, first_bad, needs_subject)


class _Clocks:
    """Columns of times of a file, read in blocks of rows.

    moments, unread: as for `Rows`. in_seconds: (K,) bool, whether a column is in seconds.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[int], decimal_comma: bool) -> None:
        self.names = names
        self._columns, self._decimal_comma = columns, decimal_comma
        self._times = [np.empty((0, len(columns), 2))]
        self.moments: dict[str, tuple[str, str]] = {}
        self.unread: dict[str, str] = {}

    @property
    def in_seconds(self) -> np.ndarray:
        return np.array([not any(map(is_number, cells)) for cells in self.moments.values()], bool)

    def add(self, lines: Sequence[Line]) -> None:
        times = moments_of(lines, self._columns, self._decimal_comma)
        self._times.append(times)
        for k, name in enumerate(self.names if lines else ()):
            cells = [fields[self._columns[k]].strip() for _, fields in lines]
            self.moments[name] = (self.moments.get(name, cells)[0], cells[-1])
            wrong = (cells[row] for row in np.flatnonzero(np.isnan(times[:, k]).all(axis=1)).tolist())
            if (cell := next((cell for cell in wrong if cell not in MISSING), None)) is not None:
                self.unread.setdefault(name, f"its value {cell!r} is not a time")

    def settle(self) -> np.ndarray:
        """Returns the times of all rows, (n, K) float64; adds columns without any time to `unread`."""
        times = settled(np.concatenate(self._times))
        for (name, (first, _)), is_known in zip(self.moments.items(), np.isfinite(times).any(axis=0), strict=False):
            if not is_known:
                why = "is not a time" if first in MISSING else "can begin with the day or the month"
                self.unread.setdefault(name, f"its value {first!r} {why}")
        return times


def signal_columns(header: Sequence[str], channels: Sequence[str], where: str) -> list[int]:
    """Returns the column index of each channel. Raises UserError unless each channel has exactly one column."""
    missing = [name for name in channels if name not in header]
    number = "nine" if len(channels) == len(SIGNALS) else str(len(channels))
    if len(missing) == len(channels):
        advice = f"give a CSV with the line of column names {','.join(channels)}"
        raise UserError(f"{where}: has none of the {number} channels; {advice}")
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}; give all {number} channels")
    _refuse_repeated(channels, header, where)
    return [header.index(name) for name in channels]


def _refuse_repeated(names: Sequence[str], header: Sequence[str], where: str) -> None:
    if repeated := {name: None for name in names if header.count(name) > 1}:
        raise UserError(f"{where}: has several columns named {', '.join(repeated)}; keep one column per name")


def _numbers(lines: Sequence[Line], columns: Sequence[int], decimal_comma: bool) -> np.ndarray:
    """Parses columns of lines to (rows, C) float32; a cell that is not a finite number becomes NaN."""
    rows = [[fields[i].replace(",", ".") if decimal_comma else fields[i] for i in columns] for _, fields in lines]
    try:
        parsed = [list(map(float, row)) for row in rows]
    except ValueError:
        parsed = [[float(text) if is_number(text) else np.nan for text in row] for row in rows]
    values = as_float32(np.array(parsed).reshape(len(lines), len(columns)))
    return np.where(np.isfinite(values), values, np.float32(np.nan))


def _what_is_wrong(
    lines: Sequence[Line], header: Sequence[str], columns: Sequence[int], decimal_comma: bool
) -> tuple[str, str]:
    """Describes the error in the first bad line; also returns advice, or "" if the error is in a cell."""
    for number, fields in lines:
        if len(fields) != len(header):
            return (
                f"line {number}: has {len(fields)} columns, but there are {len(header)} column names",
                "fix this line",
            )
        for i in columns:
            if np.isnan(_numbers([(number, fields)], [i], decimal_comma)).any():
                is_one = is_number(fields[i].replace(",", ".") if decimal_comma else fields[i])
                kind = f"a finite number below {LARGEST:g}" if is_one else "a number"
                return f"line {number}, column {i + 1} ({header[i]}): {fields[i][:_NUM_SHOWN]!r} is not {kind}", ""
    raise AssertionError("nothing is wrong with these lines")


def as_float32(array: np.ndarray) -> np.ndarray:
    """Converts an array to float32; numbers above LARGEST, whose squares could overflow in sums, become infinite."""
    with np.errstate(over="ignore"):
        values = array.astype(np.float32, copy=False)
    is_too_large = np.abs(values) > LARGEST
    return np.where(is_too_large, np.inf, values) if is_too_large.any() else values
