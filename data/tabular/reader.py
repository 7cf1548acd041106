"""Reads the user's tables."""

import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from data.csv_lines import Line, is_number
from data.files import DataFile, reading_errors
from data.table_files import STRICT, LeftOut, Reading, opened_table, tables_at
from data.tabular.spelling import UNKNOWN, Likely
from data.tabular.table import Column, Table, table_of_array
from trainer.common.errors import UserError
from trainer.common.files import MOST_WHOLE, array_errors

MOST_COLUMNS = 1000

_ROWS_AT_ONCE = 4096
_SHOWN_WIDTH = 40
_ADVICE = "give a CSV with a line of column names, or a .npz with arrays X and y"


def read_table(path: Path, flag: str = "--data-dir", reading: Reading = STRICT) -> Table:
    """Reads a table. Columns of a CSV contain strings, which `Column.typed` can convert to numbers.

    path:
        A CSV with a header, JSON lines, or parquet: plain, compressed, or as the only table of a folder or archive.
        A CSV has columns separated by commas, semicolons (then 1,234 probably has a decimal comma), tabs, | or blanks.
        Quotes and spaces around a value are removed.
        A .npz file with X of shape (n, m), numbers or strings; optionally y of shape (n,), which becomes the column y;
        and optionally names of shape (m,), the names of the columns of X.
        A folder or archive with tables for training, test and perhaps validation. Reads the training table if the flag
        is --data-dir, otherwise the test table.
    flag: the flag that gave the path. reading: encoding, and treatment of bad lines.

    Raises UserError, with file and line, for unreadable contents.
    """
    if _is_npz(path):
        return _read_arrays(path, f"{flag} {path}")
    return _read_csv(tables_at(path, flag, _ADVICE)[0 if flag == "--data-dir" else -1], reading)


def read_held_out(path: Path, reading: Reading) -> dict[str, Table]:
    """Reads the tables "test" and, if present, "val" from a folder or archive with a table for each split."""
    files = [] if _is_npz(path) else tables_at(path, "--data-dir", _ADVICE)[:0:-1]
    return {part: _read_csv(file, reading) for part, file in zip(("test", "val"), files, strict=False)}


def _is_npz(path: Path) -> bool:
    return path.suffix.lower() == ".npz" and path.is_file()


def _check_width(num_columns: int, where: str) -> None:
    if num_columns > MOST_COLUMNS:
        raise UserError(
            f"{where}: has {num_columns:,} columns, but at most {MOST_COLUMNS:,} are supported, because the time per "
            "row grows with the square of their number; keep only relevant columns"
        )


# --- CSV ---------------------------------------------------------------------------------------------------------


def _read_csv(file: DataFile, reading: Reading) -> Table:
    where = file.where
    left_out = LeftOut(reading)
    with opened_table(file, left_out) as (line, header, lines, decimal_comma):
        if not header:
            raise UserError(f"{where}: {'begins with no JSON object' if line else 'is empty'}; {_ADVICE}")
        names = _column_names(header, f"{where}, line {line}")
        columns = [_Texts() for _ in names]
        for rows in _blocks(lines, len(names), where, left_out):
            for column, texts in zip(columns, zip(*rows, strict=True) if rows else [[]] * len(columns), strict=True):
                column.add(texts)
        found = [texts.column(name) for name, texts in zip(names, columns, strict=True)]
        if not len(found[0].values):
            raise UserError(f"{where}: has column names, but no rows; give at least one row")
        return Table(where, _as_the_file_shows(found, decimal_comma), tuple(left_out.remarks()))


def _as_the_file_shows(columns: Sequence[Column], decimal_comma: bool) -> tuple[Column, ...]:
    """Sets `likely` of columns that do not show their decimal separator.

    The assumed separator is the one that the other columns show, or else "," if decimal_comma.
    """
    readings = [column.reading.spelling for column in columns]
    shown = [
        bool(spelling and spelling.is_shown_by(c.distinct_texts)) for c, spelling in zip(columns, readings, strict=True)
    ]
    signs = {spelling.decimal for spelling, is_shown in zip(readings, shown, strict=True) if spelling and is_shown}
    likely = Likely(signs.pop(), True) if len(signs) == 1 else Likely(",") if decimal_comma else UNKNOWN
    return tuple(c if is_shown else replace(c, likely=likely) for c, is_shown in zip(columns, shown, strict=True))


def _column_names(fields: Sequence[str], where: str) -> list[str]:
    """Returns column names; an unnamed column, such as pandas' row numbers, is named by its position."""
    _check_width(len(fields), where)
    names = [field or f"unnamed {i}" for i, field in enumerate(fields, start=1)]
    if all(map(is_number, names)) or any(is_number(name) and names.count(name) > 1 for name in names):
        raise UserError(
            f"{where}: has numbers instead of column names; docs/formats.md#no-line-of-names shows how to add names"
        )
    return names


def _blocks(lines: Iterable[Line], num_columns: int, where: str, left_out: LeftOut) -> Iterator[list[list[str]]]:
    """Yields blocks of lines as lists of fields; adds lines with too few or too many fields to left_out instead."""
    lines = iter(lines)
    while some := list(islice(lines, _ROWS_AT_ONCE)):
        for number, fields in some:
            if len(fields) != num_columns:
                shown = ",".join(fields)[:_SHOWN_WIDTH]
                what = f"has {len(fields)} fields, but the line of column names has {num_columns}: {shown!r}"
                quotes = ", put quotes around values that contain the separator" * (len(fields) > num_columns)
                advice = f"fix the line{quotes}, or add --on-bad drop"
                what = f"is not a JSON object: {shown!r}" if len(fields) == 1 and shown.startswith("{") else what
                line = f"{where}, line {number}: {what}"
                left_out.add(line, f"{line}; {advice}")
        yield [fields for _, fields in some if len(fields) == num_columns]


class _Texts:
    """Collects the cells of a column: stores each distinct string once, and an index for every row."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._codes: list[np.ndarray] = []

    def add(self, texts: Sequence[str]) -> None:
        places = self._places
        codes = (places.setdefault(text, len(places)) for text in texts)
        self._codes.append(np.fromiter(codes, np.int32, len(texts)))

    def column(self, name: str) -> Column:
        codes = np.concatenate([np.empty(0, np.int32), *self._codes])
        return Column.of_codes(name, codes, self._places)


# --- arrays ------------------------------------------------------------------------------------------------------


def _read_arrays(path: Path, where: str) -> Table:
    arrays = _load_arrays(path, where)
    for name, num_dimensions in {"X": 2, "y": 1, "names": 1}.items():
        array = arrays.get(name)
        if array is not None and (array.ndim != num_dimensions or array.dtype.kind not in "fiubU"):
            wanted = "X (n, m) and y (n,) with numbers or strings, and names (m,) with strings"
            raise UserError(f"{where}: {name} has type {array.dtype} and shape {array.shape}; give {wanted}")
    values, labels = arrays["X"], arrays.get("y")
    num_rows, num_columns = values.shape
    _check_width(num_columns, where)
    names = [str(name).strip() for name in arrays.get("names", [f"x{i}" for i in range(num_columns)])]
    if num_rows == 0:
        raise UserError(f"{where}: X has no rows; give at least one row")
    if len(names) != num_columns or num_columns == 0:
        raise UserError(
            f"{where}: X has {num_columns} columns, but names has {len(names)} entries; give one name per column"
        )
    table = table_of_array(values, names, where)
    if labels is None:
        return table
    if len(labels) != num_rows:
        raise UserError(f"{where}: X has {num_rows} rows, but y has {len(labels)} labels; give one label per row")
    return Table(where, (*table.columns, Column.of_values("y", labels)))


def _load_arrays(path: Path, where: str) -> dict[str, np.ndarray]:
    """Loads X and, if present, y and names; never unpickles, so no code in the file can run."""
    try:
        # numpy parses array headers with Python's parser, which warns about odd syntax.
        quiet = warnings.catch_warnings(action="ignore")
        with (
            reading_errors(where),
            array_errors(),
            path.open("rb") as file,
            quiet,
            np.load(file, allow_pickle=False) as archive,
        ):
            for part in archive.zip.infolist():
                if part.file_size > MOST_WHOLE:
                    raise UserError(
                        f"{where}: {part.filename} has {part.file_size:,} bytes, but at most {MOST_WHOLE:,} are "
                        "supported; keep fewer rows or columns"
                    )
            if "X" not in archive:
                raise UserError(f"{where}: has no array X (arrays: {', '.join(archive) or 'none'}); {_ADVICE}")
            arrays = {name: archive[name] for name in ("X", "y", "names") if name in archive}
            if odd := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{odd[0]} is not an array")
            for array in arrays.values():
                if array.dtype.kind == "U":
                    array.tolist()  # raises ValueError for invalid characters
            return arrays
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        if not zipfile.is_zipfile(path):  # numpy mistakes text for pickled objects
            raise UserError(f"{where}: is not an .npz file; {_ADVICE}") from None
        found = "contains Python objects" if "allow_pickle" in str(error) else f"is damaged ({error})"
        raise UserError(
            f"{where}: {found}; no code in the file was run; save arrays of numbers and strings with numpy.savez"
        ) from None
