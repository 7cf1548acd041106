"""Reads the signals given by `--predict`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data.har.clocks import is_same_rate, middle_rate_hz, num_disorders, seconds_of, usual_rate_hz
from data.har.rows import LABELS, LARGEST, SUBJECTS, Recording, Rows, as_float32, read_rows, roles_of, usual_column
from data.har.windows import WindowFormat, triplets_first
from data.table_files import STRICT, LeftOut, Reading, opened_table, tables_at
from trainer.common.errors import UserError
from trainer.common.files import array_errors, require_regular
from trainer.loading.order import SampleKeys

_OTHER_SIZE = 4.0
"""If a sensor's root mean squares in a recording and in training differ by more than this factor, units may differ."""
_CONSTANT = 0.5
"""A sensor whose mean exceeds this share of its root mean square measures a constant, such as gravity."""
_USUAL_FACTORS = {9.80665: ("m/s²", "g"), 180 / math.pi: ("degrees", "radians"), 1000.0: ("thousandths", "whole units")}
_NEAR = 1.6


@dataclass(frozen=True)
class NewWindows:
    """Data set of sensor windows without labels, in physical units.

    where: the file's name in messages. signals: (N, C, T) float32. start_s: (N,) float64, start of each window, in
    seconds since the first row of its person and trial. duration_s: length of a window, in seconds. start_s and
    duration_s are None for a .npy file. remarks: lines to print. cells: maps the columns of person
    and trial to the windows' cells, as spelled in the file.
    """

    where: str
    signals: np.ndarray
    start_s: np.ndarray | None = None
    duration_s: float | None = None
    remarks: tuple[str, ...] = ()
    cells: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.signals)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """Returns {"signals": (n, C, T) float32}."""
        return {"signals": np.ascontiguousarray(self.signals[keys.index])}


UCI_HAR = WindowFormat()


def read_new_windows(
    path: Path, wanted: WindowFormat = UCI_HAR, subject_column: str | None = None, label_column: str | None = None,
    reading: Reading = STRICT,
) -> NewWindows:  # fmt: skip
    """Reads the file given by `--predict` as windows.

    path: a table (see `opened_table`) with the sample rate of the training data, or a .npy array of windows (N, C, T).
    A table has columns with the channels' names, in any order; other columns are ignored. The table is cut into windows
    like the training data: no window spans missing time, two people or two trials, and leftover rows are dropped.
    subject_column, label_column: names of the columns with subjects and labels; None: usual names.

    Raises UserError for invalid data, with file, line and column (for an array: window, signal and sample), and if the
    times contradict the training data's sample rate.
    """
    label = f"--predict {path}"
    try:
        require_regular(path)
        if path.suffix.lower() == ".npy":
            return NewWindows(label, _read_array(path, label, wanted))
        left_out = LeftOut(reading)
        rows, names = _read_recording(path, label, wanted.channels, subject_column, label_column, left_out)
    except OSError as error:
        raise UserError(f"{label}: {error.strerror or error}; give a file with recordings") from None
    return _windows_of(rows, names, label, wanted, left_out.remarks())


def _windows_of(
    rows: Rows, names: Sequence[str], label: str, wanted: WindowFormat, remarks: Sequence[str]
) -> NewWindows:
    """Cuts rows into windows. names: columns whose cells begin each tuple of `rows.trials`."""
    length = wanted.length
    pieces = [(piece, range(piece.start, piece.stop - length + 1, wanted.hop)) for piece in rows.recordings(False)]
    first_rows = np.array([row for _, starts in pieces for row in starts], np.int64)
    if not len(first_rows):
        found = f"has {len(rows.signals)} rows below its line of column names"
        if len(pieces) > 1:
            found += (
                f", and at most {max(piece.stop - piece.start for piece, _ in pieces)} rows of one person without a gap"
            )
        needed = f"a window has {length} rows ({length / wanted.rate_hz:g} s at {wanted.rate_hz:g} Hz)"
        raise UserError(f"{label}: {found}, but {needed}; give a longer recording")
    rates = [(piece.rate_hz, len(starts)) for piece, starts in pieces if piece.rate_hz is not None and len(starts)]
    rate_hz = wanted.rate_hz
    if (told_hz := middle_rate_hz(rates)) is not None:
        if not is_same_rate(told_hz, rate_hz):
            raise UserError(
                f"{label}: the clock ({', '.join(rows.moments)}) shows {told_hz:.4g} rows per second, but the run was "
                f"trained at {rate_hz:.4g}; resample the recording, or remove the clock column if it is wrong"
            )
        rate_hz = usual_rate_hz(told_hz)
    seconds, end = np.empty(len(rows.signals)), 0
    for _, run in groupby(range(len(seconds)), key=lambda row: rows.trials[row][: len(names)]):
        of_run, begin = list(run), end
        by_clock = seconds_of(rows.clocks[of_run], rows.in_seconds)
        seconds[of_run] = (rows.places[of_run] - begin) / rate_hz if by_clock is None else by_clock
        end = rows.places[of_run[-1]] + 1
    cells = {name: [rows.trials[row][k] for row in first_rows.tolist()] for k, name in enumerate(names)}
    signals = sliding_window_view(rows.signals, length, axis=0)[first_rows]
    remarks = [*remarks, *_remarks(rows, label, [piece for piece, _ in pieces])]
    return NewWindows(label, signals, seconds[first_rows], length / rate_hz, tuple(remarks), cells)


def _remarks(rows: Rows, label: str, pieces: Sequence[Recording]) -> Iterator[str]:
    if num_gaps := sum(piece.is_behind_gap for piece in pieces):
        yield f"{label}: the clock has {num_gaps:,} gaps; no window spans a gap."
    if num_back := sum(num_disorders(rows.clocks[piece.start : piece.stop]) for piece in pieces):
        yield (
            f"Warning: {label}: the clock runs backwards {num_back:,} times within recordings. If the rows are out of "
            "order, sort them by time."
        )
    if (num_people := len(set(rows.subjects))) > 1:
        yield f"{label}: has rows of {num_people} people; each window has rows of only one person."
    if any(rows.labels):
        yield f"{label}: the label column is ignored."
    for name, why in rows.unread.items():
        yield (
            f"Warning: {label}: the column {name} has the name of a clock, but {why}, so gaps and a different sampling "
            "rate are not detected."
        )


def doubt_about_units(windows: NewWindows, channels: Sequence[str], mean: np.ndarray, std: np.ndarray) -> str:
    """Describes sensors whose values are far larger or smaller than in training; returns "" if there are none.

    mean, std: (C,), statistics of the training channels. A sensor's channels x, y and z are judged together. Small
    values are reported only for sensors that measure a constant component, such as gravity.
    """
    told: list[str] = []
    found = windows.signals.mean(axis=(0, 2), dtype=np.float64), windows.signals.std(axis=(0, 2), dtype=np.float64)
    num_triplets = triplets_first(channels)[1]
    triplets = [slice(3 * k, 3 * k + 3) for k in range(num_triplets)]
    for sensor in [*triplets, *(slice(k, k + 1) for k in range(3 * num_triplets, len(channels)))]:
        now, then = (np.linalg.norm([part[sensor] for part in parts]) for parts in (found, (mean, std)))
        if now == 0:
            continue
        constants = np.linalg.norm(found[0][sensor]) / now, np.linalg.norm(mean[sensor]) / then
        factor = float(now / then)
        if factor > _OTHER_SIZE or (factor < 1 / _OTHER_SIZE and min(constants) > _CONSTANT):
            unit = _known_unit(factor)
            told.append(f"values of {', '.join(channels[sensor])} are {factor:.3g} times as large as in training{unit}")
    return "; ".join(told) and f"{'; '.join(told)}. If the units differ from training, the predicted labels are wrong"


def _known_unit(factor: float) -> str:
    for usual, units in _USUAL_FACTORS.items():
        for of_units, known in ((units, usual), (units[::-1], 1 / usual)):
            if abs(np.log(factor / known)) < np.log(_NEAR):
                return f" (as {of_units[0]} instead of {of_units[1]})"
    return ""


# --- arrays ------------------------------------------------------------------------------------------------------


def _read_array(path: Path, label: str, window: WindowFormat) -> np.ndarray:
    channels = window.channels
    wanted = f"(N, {len(channels)}, {window.length})"
    try:
        with array_errors():
            array = np.load(path, allow_pickle=False)
    except ValueError as error:
        if path.stat().st_size == 0:
            reason = "is empty"
        elif "allow_pickle" in str(error):
            reason = "contains Python objects or is not a .npy file; no code in the file was run"
        else:
            reason = f"is damaged ({error})"
        raise UserError(f"{label}: {reason}; give windows of shape {wanted}, saved with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{label}: contains several arrays; give one array of shape {wanted}, saved with numpy.save")
    if array.dtype.kind not in "fiu":
        raise UserError(f"{label}: has the data type {array.dtype}; give real numbers, such as float32")
    if array.ndim != 3 or array.shape[1:] != (len(channels), window.length):
        order = f"the signals in the order {', '.join(channels)}"
        raise UserError(f"{label}: has shape {array.shape}; give windows of shape {wanted}, with {order}")
    if len(array) == 0:
        raise UserError(f"{label}: contains no windows; give at least one window")
    signals = as_float32(array)
    if not np.isfinite(signals).all():
        row, signal, sample = np.argwhere(~np.isfinite(signals))[0].tolist()
        where = f"window {row}, signal {channels[signal]}, sample {sample} (all counted from 0)"
        raise UserError(
            f"{label}, {where}: {array[row, signal, sample]} is not a finite number below {LARGEST:g}; repair the file"
        )
    return signals


# --- recordings --------------------------------------------------------------------------------------------------


def _read_recording(
    path: Path, label: str, channels: Sequence[str], subject_column: str | None, label_column: str | None,
    left_out: LeftOut,
) -> tuple[Rows, list[str]]:  # fmt: skip
    """Reads a table; also returns the names of the person and trial columns, in the order of `Rows.trials`."""
    with opened_table(tables_at(path, "--predict", "give a file with recordings")[-1], left_out) as table:
        if not table.header:
            raise UserError(f"{label}: is empty; give a CSV whose first line names the signals {', '.join(channels)}")
        subject = usual_column(table.header, SUBJECTS, subject_column)
        label_of_rows = usual_column(table.header, LABELS, label_column)
        roles = roles_of(table.header, channels, subject, label_of_rows)
        roles = replace(roles, trials=(*([] if subject is None else [subject]), *roles.trials))
        advice = "repair the file, or add --on-bad drop or interpolate"
        rows = read_rows(table, channels, roles, label, advice, left_out)
        return rows, [table.header[column] for column in roles.trials]
