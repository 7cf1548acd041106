"""New inertial signals to be labelled: one recording as a CSV, or windows that are cut already as a .npy."""

import csv
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data.har.windows import SAMPLE_RATE_HZ, SIGNALS, WINDOW_LENGTH
from trainer.loading.errors import BadInput
from trainer.loading.order import SampleKeys

HOP_LENGTH = WINDOW_LENGTH // 2
"""Rows from the start of one window to that of the next: they overlap by half, as those of the training data do."""
STANDING_STILL_G = (0.5, 2.0)
FASTEST_TURN_RAD_S = 10.0

_ROWS_AT_ONCE = 4096
_NUM_SHOWN = 30


class NewWindows:
    """Windows without labels, in physical units."""

    def __init__(self, signals: np.ndarray, first_rows: np.ndarray | None) -> None:
        """signals: (N, 9, 128) float32. first_rows: (N,) int64, where in a recording they begin, if that is known."""
        self.signals = signals
        self.first_rows = first_rows

    def __len__(self) -> int:
        return len(self.signals)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """{"signals": (n, 9, 128) float32}, and of a recording {"first_row": (n,) int64}."""
        samples = {"signals": np.ascontiguousarray(self.signals[keys.index])}
        return samples if self.first_rows is None else {**samples, "first_row": self.first_rows[keys.index]}


def read_new_windows(path: Path) -> NewWindows:
    """Reads the file of `--predict`.

    path: either the CSV of one continuous recording at 50 Hz, whose header names the nine signals in any order and
        perhaps other columns, which are ignored. It is cut into windows of 128 rows that overlap by half; a rest at
        the end, shorter than half a window, is dropped. Or, with the suffix .npy, windows of shape (N, 9, 128), the
        signals in the order of SIGNALS. Acceleration is in g, angular velocity in rad/s.

    Raises BadInput, naming file, line and column (of an array window, signal and sample), for whatever is wrong.
    """
    label = f"--predict {path}"
    try:
        if path.suffix.lower() == ".npy":
            return NewWindows(_read_array(path, label), first_rows=None)
        rows = _read_recording(path, label)
    except OSError as error:
        raise BadInput(f"{label}: {error.strerror or error}; give a file with recordings") from None
    if len(rows) < WINDOW_LENGTH:
        needed = f"a window takes {WINDOW_LENGTH} ({WINDOW_LENGTH / SAMPLE_RATE_HZ} s at {SAMPLE_RATE_HZ} Hz)"
        raise BadInput(f"{label}: has {len(rows)} rows below its header, and {needed}; give a longer recording")
    signals = sliding_window_view(rows, WINDOW_LENGTH, axis=0)[::HOP_LENGTH]
    return NewWindows(signals, first_rows=np.arange(len(signals)) * HOP_LENGTH)


def doubts_about_units(windows: NewWindows) -> list[str]:
    """One sentence for each sensor whose numbers a person with a phone at the waist cannot have caused."""
    gravity, turn = (float(np.median(_norms(windows.signals, kind))) for kind in ("total_acc", "body_gyro"))
    found = []
    if not STANDING_STILL_G[0] <= gravity <= STANDING_STILL_G[1]:
        found.append(
            f"the median length of total_acc is {gravity:.3g}, where gravity alone is 1: the accelerations must be in "
            "g (m/s² divided by 9.80665)"
        )
    if turn > FASTEST_TURN_RAD_S:
        found.append(f"the median length of body_gyro is {turn:.3g}, too fast for a person: it must be in rad/s")
    return found


def _norms(signals: np.ndarray, kind: str) -> np.ndarray:
    """The lengths of one sensor's vectors: (N, 128)."""
    first = SIGNALS.index(f"{kind}_x")
    return np.linalg.norm(signals[:, first : first + 3], axis=1)


# --- arrays ------------------------------------------------------------------------------------------------------


def _read_array(path: Path, label: str) -> np.ndarray:
    """(N, 9, 128) float32, N at least 1."""
    wanted = f"(N, {len(SIGNALS)}, {WINDOW_LENGTH})"
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        if path.stat().st_size == 0:
            reason = "is empty"
        elif "allow_pickle" in str(error):
            reason = "holds Python objects, or is no .npy file; nothing in it was run"
        else:
            reason = f"is damaged ({str(error).splitlines()[0]})"
        raise BadInput(f"{label}: {reason}; give windows of shape {wanted}, saved by numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise BadInput(f"{label}: is an archive of arrays; give one array of shape {wanted}, saved by numpy.save")
    if array.dtype.kind not in "fiu":
        raise BadInput(f"{label}: has numbers of type {array.dtype}; give real numbers, such as float32")
    if array.ndim != 3 or array.shape[1:] != (len(SIGNALS), WINDOW_LENGTH):
        order = f"the signals in the order {', '.join(SIGNALS)}"
        raise BadInput(f"{label}: has shape {array.shape}; windows have shape {wanted}, {order}")
    if len(array) == 0:
        raise BadInput(f"{label}: holds no window; give at least one")
    signals = _as_float32(array)
    if not np.isfinite(signals).all():
        window, signal, sample = np.argwhere(~np.isfinite(signals))[0].tolist()
        where = f"window {window}, signal {SIGNALS[signal]}, sample {sample} (all counted from 0)"
        raise BadInput(f"{label}, {where}: {array[window, signal, sample]} is not a finite number; repair the file")
    return signals


def _as_float32(array: np.ndarray) -> np.ndarray:
    """What float32 cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


# --- recordings --------------------------------------------------------------------------------------------------

Line = tuple[int, list[str]]
"""The number of a line in its file, from 1, and its fields."""


def _read_recording(path: Path, label: str) -> np.ndarray:
    """(rows, 9) float32, columns as in SIGNALS."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            lines = ((reader.line_num, fields) for fields in reader if fields)  # blank lines hold no sample
            _, header = next(lines, (0, []))
            header = [name.strip() for name in header]
            columns = _signal_columns(header, label)
            parts = list(_parse_lines(lines, header, columns, label))
        except UnicodeDecodeError as error:
            reason = f"is no text in UTF-8, but has the byte 0x{error.object[error.start]:02x}"
            raise BadInput(f"{label}: {reason}; give a CSV, or an array as .npy") from None
        except csv.Error as error:
            raise BadInput(f"{label}, line {reader.line_num}: {error}; give a CSV, or an array as .npy") from None
    return np.concatenate(parts) if parts else np.empty((0, len(SIGNALS)), np.float32)


def _signal_columns(header: Sequence[str], label: str) -> list[int]:
    """The column of each signal, counted from 0. Raises BadInput when a signal has none, or several."""
    if not header:
        raise BadInput(f"{label}: is empty; give a CSV whose first line names the signals {', '.join(SIGNALS)}")
    missing = [name for name in SIGNALS if name not in header]
    if len(missing) == len(SIGNALS):
        advice = f"give a CSV whose first line names them, separated by commas: {','.join(SIGNALS)}"
        raise BadInput(f"{label}, line 1: names none of the nine signals; {advice}")
    if missing:
        raise BadInput(f"{label}, line 1: lacks {', '.join(missing)}; all nine signals are needed")
    twice = [name for name in SIGNALS if header.count(name) > 1]
    if twice:
        raise BadInput(f"{label}, line 1: names {', '.join(twice)} more than once; keep one column of each")
    return [header.index(name) for name in SIGNALS]


def _parse_lines(
    lines: Iterable[Line], header: Sequence[str], columns: Sequence[int], label: str
) -> Iterator[np.ndarray]:
    """Arrays of (rows, 9) float32."""
    lines = iter(lines)
    while some := list(islice(lines, _ROWS_AT_ONCE)):
        values = _numbers(some, len(header), columns)
        if values is None or not np.isfinite(values).all():
            raise BadInput(f"{label}, {_what_is_wrong(some, header, columns)}; repair the file")
        yield values


def _numbers(lines: Sequence[Line], num_columns: int, columns: Sequence[int]) -> np.ndarray | None:
    """(rows, 9) float32; None when a line has too few or too many fields, or a field is not a number."""
    if any(len(fields) != num_columns for _, fields in lines):
        return None
    try:
        return _as_float32(np.array([[float(fields[i]) for i in columns] for _, fields in lines]))
    except ValueError:
        return None


def _what_is_wrong(lines: Sequence[Line], header: Sequence[str], columns: Sequence[int]) -> str:
    """Says slowly and precisely what is wrong with the first line that is."""
    for number, fields in lines:
        if len(fields) != len(header):
            return f"line {number}: {len(fields)} columns, but the header has {len(header)}"
        for i in columns:
            values = _numbers([(number, fields)], len(header), [i])
            if values is None or not np.isfinite(values).all():
                kind = "a number" if values is None else "a finite number"
                return f"line {number}, column {i + 1} ({header[i]}): {fields[i][:_NUM_SHOWN]!r} is not {kind}"
    raise AssertionError("nothing is wrong with these lines")
