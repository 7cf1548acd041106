"""Reads files of whole numbers."""

import io
from dataclasses import dataclass

import numpy as np

from data.files import DataFile
from trainer.common.errors import UserError
from trainer.common.files import array_errors

LARGEST_ID = 10**8
"""Largest accepted id; some arrays have an element for every smaller id."""
_ALLOWED = b"0123456789 \t\n\r\v\f"
_SHOWN_WIDTH = 60


@dataclass(frozen=True)
class Numbers:
    """One or more non-empty rows of whole numbers from 0 to LARGEST_ID.

    values: (n,) int64.
    offsets: (rows + 1,) int64; row r has values[offsets[r] : offsets[r + 1]].
    lines: (rows,) int64, line number of each row in the file, from 1.
    """

    where: str
    values: np.ndarray
    offsets: np.ndarray
    lines: np.ndarray

    @classmethod
    def read(cls, file: DataFile) -> "Numbers":
        """Reads numbers from a text file, separated by spaces or tabs, or from a two-dimensional .npy file.

        Raises UserError if the file is empty or contains other values.
        """
        content = file.read()
        numbers = _from_array(file, content) if file.bare_name.endswith(".npy") else _from_text(file, content)
        if not len(numbers.values):
            raise UserError(f"{file.where}: is empty; download it again")
        outside = np.flatnonzero((numbers.values < 0) | (numbers.values > LARGEST_ID))
        if len(outside):
            row = int(np.searchsorted(numbers.offsets, outside[0], side="right")) - 1
            reason = f"{numbers.values[outside[0]]} is not an id from 0 to {LARGEST_ID:,}"
            raise numbers.mistake(row, reason)
        return numbers

    @property
    def first(self) -> np.ndarray:
        """First value of each row: (rows,) int64."""
        return self.values[self.offsets[:-1]]

    def columns(self, names: str) -> np.ndarray:
        """Returns values (rows, columns), one column per word of `names`. Raises UserError for other row lengths."""
        num_columns = len(names.split())
        wrong = np.flatnonzero(np.diff(self.offsets) != num_columns)
        if len(wrong):
            width = np.diff(self.offsets)[wrong[0]]
            raise self.mistake(int(wrong[0]), f"has {width} column{'s' * bool(width != 1)} instead of `{names}`")
        return self.values.reshape(-1, num_columns)

    def refuse(self, is_wrong: np.ndarray, reason: str, rows: np.ndarray | None = None, **values: np.ndarray) -> None:
        """Raises UserError for the first wrong value. is_wrong: (n,) bool.

        reason: template of the message; {name} becomes the element of values[name] at the index of the wrong value.
        rows: (n,), row of each value; by default, value i is in row i.
        """
        if is_wrong.any():
            i = int(np.argmax(is_wrong))
            raise self.mistake(i if rows is None else rows[i], reason.format_map({k: v[i] for k, v in values.items()}))

    def mistake(self, row: int, reason: str) -> UserError:
        """Builds a UserError that names the file and shows a row."""
        values = self.values[self.offsets[row] : self.offsets[row + 1]]
        return _mistake(self.where, int(self.lines[row]), " ".join(map(str, values[:_SHOWN_WIDTH])), reason)


def _from_text(file: DataFile, text: bytes) -> Numbers:
    text = text.removeprefix(b"\xef\xbb\xbf")
    if text.translate(None, _ALLOWED):
        raise _no_number(file, text)
    characters = np.frombuffer(text, np.uint8)
    is_digit = characters >= ord("0")
    starts = np.flatnonzero(is_digit & ~np.concatenate([[False], is_digit[:-1]]))
    before_line_end = np.searchsorted(starts, np.flatnonzero(characters == ord("\n")))
    offsets = np.concatenate([[0], before_line_end, [len(starts)]])
    is_row = np.diff(offsets) > 0
    # fromstring returns [0] for white space, and the largest int64 for larger numbers
    values = np.fromstring(text, np.int64, sep=" ") if len(starts) else np.empty(0, np.int64)
    return Numbers(file.where, values, np.append(offsets[:-1][is_row], len(starts)), np.flatnonzero(is_row) + 1)


def _from_array(file: DataFile, content: bytes) -> Numbers:
    try:
        with array_errors():
            array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError) as error:
        raise UserError(
            f"{file.where}: is damaged, or is not an array of numbers ({error}); download it again"
        ) from None
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(
            f"{file.where}: is an array of {array.dtype} with shape {array.shape}; give a two-dimensional array "
            "of integers"
        )
    rows, columns = array.shape
    return Numbers(file.where, array.astype(np.int64).ravel(), np.arange(rows + 1) * columns, np.arange(rows) + 1)


def _no_number(file: DataFile, text: bytes) -> UserError:
    for number, line in enumerate(text.split(b"\n"), start=1):
        for field in line.split():
            if not field.isdigit():
                reason = f"{_decoded(field)!r} is not a whole number of at least 0"
                if number == 1 and not any(map(str.isdigit, _decoded(line))):
                    reason += " (column names are not allowed)"
                return _mistake(file.where, number, _decoded(line), reason)
    raise AssertionError("all are numbers")


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")


def _mistake(where: str, number: int, line: str, reason: str) -> UserError:
    line = line.strip()
    line = line if len(line) <= _SHOWN_WIDTH else line[: _SHOWN_WIDTH - 3] + "..."
    return UserError(f"{where}, line {number}: {line!r}: {reason}; fix the file, or give another --data-dir")
