"""New inertial signals to be labelled: one recording as a CSV, or windows that are cut already as a .npy."""

import gzip
import zipfile
import zlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data.csv_lines import Line, csv_table, reading_utf8
from data.har.windows import SIGNALS, WindowFormat
from trainer.common.errors import BadInput
from trainer.common.files import require_regular
from trainer.loading.order import SampleKeys

STANDING_STILL_G = (0.5, 2.0)
FASTEST_TURN_RAD_S = 10.0

ROWS_AT_ONCE = 4096
LARGEST = 1e15
"""No sensor's number is larger."""
_NUM_SHOWN = 30


class NewWindows:
    """Windows without labels, in physical units."""

    def __init__(self, signals: np.ndarray, first_rows: np.ndarray | None) -> None:
        """signals: (N, C, T) float32. first_rows: (N,) int64, where in a recording they begin, if that is known."""
        self.signals = signals
        self.first_rows = first_rows

    def __len__(self) -> int:
        return len(self.signals)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """{"signals": (n, C, T) float32}, and of a recording {"first_row": (n,) int64}."""
        samples = {"signals": np.ascontiguousarray(self.signals[keys.index])}
        return samples if self.first_rows is None else {**samples, "first_row": self.first_rows[keys.index]}


UCI_HAR = WindowFormat()


def read_new_windows(path: Path, wanted: WindowFormat = UCI_HAR) -> NewWindows:
    """Reads the file of `--predict`.

    path: either the CSV, plain or .gz, of one continuous recording at the rate of the training data, whose header names
        the channels in any order and perhaps other columns, which are ignored. It is cut into windows as those were; a
        rest at the end, shorter than a hop, is dropped. Or, with the suffix .npy, windows (N, C, T), the channels in
        their order.

    Raises BadInput, naming file, line and column (of an array window, signal and sample), for whatever is wrong.
    """
    label = f"--predict {path}"
    try:
        require_regular(path)
        if path.suffix.lower() == ".npy":
            return NewWindows(_read_array(path, label, wanted), first_rows=None)
        rows = _read_recording(path, label, wanted.channels)
    except (EOFError, zlib.error) as error:
        raise BadInput(f"{label}: is damaged: {error}; give the whole file") from None
    except OSError as error:
        raise BadInput(f"{label}: {error.strerror or error}; give a file with recordings") from None
    if len(rows) < wanted.length:
        needed = f"a window takes {wanted.length} ({wanted.length / wanted.rate_hz:g} s at {wanted.rate_hz:g} Hz)"
        raise BadInput(f"{label}: has {len(rows)} rows below its header, and {needed}; give a longer recording")
    signals = sliding_window_view(rows, wanted.length, axis=0)[:: wanted.hop]
    return NewWindows(signals, first_rows=np.arange(len(signals)) * wanted.hop)


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


def _read_array(path: Path, label: str, window: WindowFormat) -> np.ndarray:
    """(N, C, T) float32, N at least 1."""
    channels = window.channels
    wanted = f"(N, {len(channels)}, {window.length})"
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
    if array.ndim != 3 or array.shape[1:] != (len(channels), window.length):
        order = f"the signals in the order {', '.join(channels)}"
        raise BadInput(f"{label}: has shape {array.shape}; windows have shape {wanted}, {order}")
    if len(array) == 0:
        raise BadInput(f"{label}: holds no window; give at least one")
    signals = _as_float32(array)
    if not np.isfinite(signals).all():
        row, signal, sample = np.argwhere(~np.isfinite(signals))[0].tolist()
        where = f"window {row}, signal {channels[signal]}, sample {sample} (all counted from 0)"
        raise BadInput(
            f"{label}, {where}: {array[row, signal, sample]} is not a finite number below {LARGEST:g}; repair the file"
        )
    return signals


def _as_float32(array: np.ndarray) -> np.ndarray:
    """What is too large to be squared and added up in float32 becomes infinite."""
    with np.errstate(over="ignore"):
        values = array.astype(np.float32, copy=False)
    is_too_large = np.abs(values) > LARGEST
    return np.where(is_too_large, np.inf, values) if is_too_large.any() else values


# --- recordings --------------------------------------------------------------------------------------------------


def _read_recording(path: Path, label: str, channels: Sequence[str]) -> np.ndarray:
    """(rows, C) float32."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with (
        opened(path, "rt", encoding="utf-8-sig", newline="") as file,
        reading_utf8(label, "give a CSV, or an array as .npy"),
    ):
        line, header, lines, decimal_comma = csv_table(file, label)
        if not header:
            raise BadInput(f"{label}: is empty; give a CSV whose first line names the signals {', '.join(channels)}")
        columns = signal_columns(header, channels, f"{label}, line {line}")
        parts = []
        while some := list(islice(lines, ROWS_AT_ONCE)):
            parts.append(numbers(some, header, columns, label, decimal_comma))
    return np.concatenate(parts) if parts else np.empty((0, len(channels)), np.float32)


def signal_columns(header: Sequence[str], channels: Sequence[str], where: str) -> list[int]:
    """The column of each channel, counted from 0. Raises BadInput when a channel has none, or several."""
    missing = [name for name in channels if name not in header]
    number = "nine" if len(channels) == len(SIGNALS) else str(len(channels))
    if len(missing) == len(channels):
        advice = f"give a CSV whose first line names them, separated by commas: {','.join(channels)}"
        raise BadInput(f"{where}: names none of the {number} signals; {advice}")
    if missing:
        raise BadInput(f"{where}: lacks {', '.join(missing)}; all {number} signals are needed")
    twice = [name for name in channels if header.count(name) > 1]
    if twice:
        raise BadInput(f"{where}: names {', '.join(twice)} more than once; keep one column of each")
    return [header.index(name) for name in channels]


def numbers(
    lines: Sequence[Line], header: Sequence[str], columns: Sequence[int], label: str, decimal_comma: bool,
    advice: str = "repair the file",
) -> np.ndarray:  # fmt: skip
    """Some columns of some lines, (rows, C) float32. Raises BadInput, with line and column.

    advice: what to do where a field is no number.
    """
    values = _numbers(lines, len(header), columns, decimal_comma)
    if values is None or not np.isfinite(values).all():
        raise BadInput(f"{label}, {_what_is_wrong(lines, header, columns, decimal_comma, advice)}")
    return values


def _numbers(lines: Sequence[Line], num_columns: int, columns: Sequence[int], decimal_comma: bool) -> np.ndarray | None:
    """None when a line has too few or too many fields, or a field is not a number."""
    if any(len(fields) != num_columns for _, fields in lines):
        return None
    rows = [[fields[i] for i in columns] for _, fields in lines]
    if decimal_comma:
        rows = [[field.replace(",", ".") for field in row] for row in rows]
    try:
        return _as_float32(np.array([list(map(float, row)) for row in rows]))
    except ValueError:
        return None


def _what_is_wrong(
    lines: Sequence[Line], header: Sequence[str], columns: Sequence[int], decimal_comma: bool, advice: str
) -> str:
    """Says slowly and precisely what is wrong with the first line that is, and what to do."""
    for number, fields in lines:
        if len(fields) != len(header):
            return f"line {number}: {len(fields)} columns, but the header has {len(header)}; mend that line"
        for i in columns:
            values = _numbers([(number, fields)], len(header), [i], decimal_comma)
            if values is None or not np.isfinite(values).all():
                kind = "a number" if values is None else f"a finite number below {LARGEST:g}"
                shown = fields[i][:_NUM_SHOWN]
                return f"line {number}, column {i + 1} ({header[i]}): {shown!r} is not {kind}; {advice}"
    raise AssertionError("nothing is wrong with these lines")
