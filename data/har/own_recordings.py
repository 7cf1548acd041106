"""Reads the user's recordings (tables with a subject, a label and any channels) and cuts them into windows."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NoReturn

import numpy as np

from data.csv_lines import CsvTable, Line, in_order, is_number
from data.files import DataFile, Folder, Zip, is_visible, not_read, reading_errors, shown, single, source_at
from data.har.clocks import GAP, is_same_rate
from data.har.cut import Cut
from data.har.rows import (
    LABELS,
    ROWS_AT_ONCE,
    SUBJECTS,
    Rows,
    key_of_name,
    read_rows,
    roles_of,
    usual_column,
    why_no_signal,
)
from data.har.windows import HarRecordings, triplets_first
from data.moments import moments_of
from data.overview import overview
from data.table_files import STRICT, LeftOut, Reading, opened_table
from trainer.common.errors import UserError
from trainer.loading.cache import Arrays, array_of_texts, cached_arrays, digest_of, key_of, texts_of_array

_FORMAT_VERSION = 9
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_MOST_LISTED = 10_000
"""Largest number of files examined for a message about unknown data."""
_PUBLISHED = {
    r"subject1\d\d\.dat": "PAMAP2",
    r"mHealth_subject\d+\.log": "MHEALTH",
    r"S\d-(ADL\d|Drill)\.dat": "OPPORTUNITY",
    r"WISDM.*|data_\d+_(accel|gyro)_(phone|watch)\.txt": "WISDM",
}
"""Maps patterns of file names to names of well-known data sets."""
_OF_TABLE = ("window", "start_s", "end_s", "activity", "confidence")
"""Columns of the table that `--predict` writes; the table also has a column per class."""


@dataclass(frozen=True)
class OwnFormat:
    """Format of the user's recordings.

    subject_column, label_column: None: found by common names, such as "subject". channels: None: all other columns.
    """

    subject_column: str | None
    label_column: str | None
    channels: tuple[str, ...] | None
    length: int
    hop: int
    reading: Reading = STRICT


@dataclass(frozen=True)
class OwnRecordings:
    """Windows of the user's recordings, before the split.

    remarks: lines to print, beginning with a table of the columns. digest: hash of windows, labels and subjects.
    rate_hz: rows per second; None if no clock is usable.
    """

    recordings: HarRecordings
    remarks: Sequence[str]
    digest: str
    rate_hz: float | None


def are_own(path: Path) -> bool:
    """Returns whether a path is a table, or a folder or zip that contains tables and is not UCI HAR."""
    if path.is_dir():
        published = ("train", "UCI HAR Dataset", "UCI HAR Dataset.zip")
        with reading_errors(f"--data-dir {path}"):
            has_table = any(_is_table(file) for file in Folder(path).files)
            return has_table and not any((path / p).exists() for p in published)
    if path.is_file() and path.name.lower().endswith(".zip"):
        return any(_is_table(file) for file in Zip(path, f"--data-dir {path}").files)
    return path.is_file() and single(path, "").bare_name.endswith((*_SUFFIXES, ".json"))


def refuse_other_data(path: Path) -> NoReturn:
    """Raises UserError for data that are neither tables nor UCI HAR, with a guess at their format."""
    names = [path.name]
    if path.is_dir():
        with reading_errors(f"--data-dir {path}"):
            names = [name for name in islice(Folder(path, depth=6).names(), _MOST_LISTED) if is_visible(name)]
    for pattern, published in _PUBLISHED.items():
        if some := [name for name in names if re.fullmatch(pattern, PurePosixPath(name).name)]:
            raise not_read(f"--data-dir {path}", f"{published} ({min(some)})", published.lower())
    if path.is_file():
        with opened_table(single(path, "--data-dir"), LeftOut()):
            pass  # raises UserError if the file has a known unsupported format
    found = "is neither UCI HAR (a folder or a zip) nor a table of recordings; give a table whose name ends in "
    found += f"{', '.join(_SUFFIXES)}, optionally followed by .gz, .bz2, .xz or .zip"
    if path.is_dir():
        found += f", or a folder of tables; files found: {shown(names)}"
    if tables := [file.name for file in Folder(path, depth=3).files if _is_table(file)]:
        found = f"has tables in subfolders ({shown(tables)}); put all tables into one folder"
    raise UserError(f"--data-dir {path}: {found}")


def load_own_recordings(path: Path, cache_dir: Path, wanted: OwnFormat) -> OwnRecordings:
    """Reads the user's recordings and caches their windows.

    path: a table (see `opened_table`), or a folder or zip of tables with the same channels. Rows must be in time order.
    Consecutive rows of a file with equal subject and label form a recording. A recording also ends where a trial or
    session column changes and where the clock jumps. Recordings are cut into windows of `length` rows that start every
    `hop` rows; leftover rows and rows without a label are dropped.

    Channels are in the order of the first file, with x, y and z of sensors first (`triplets_first`). Subjects and
    classes are sorted by name, or by value if all are whole numbers.

    Raises UserError, with file, line and column, for invalid data.
    """
    path = path.resolve()
    source = source_at(path, depth=1, advice="give a CSV file of recordings, or a folder of such files")
    files = [single(path, "--data-dir")] if source is None else [file for file in source.files if _is_table(file)]
    key = key_of("har_own", _FORMAT_VERSION, [file.stamp for file in files], wanted)
    arrays = cached_arrays(cache_dir, key, lambda: _build(files, wanted))
    recordings = HarRecordings(
        arrays["signals"],
        arrays["labels"],
        arrays["subjects"],
        np.zeros(len(arrays["labels"]), bool),
        texts_of_array(arrays["channels"]),
        texts_of_array(arrays["classes"]),
        texts_of_array(arrays["subject_names"]),
    )
    rate_hz = float(arrays["rate_hz"])
    return OwnRecordings(
        recordings,
        texts_of_array(arrays["remarks"]),
        texts_of_array(arrays["digest"])[0],
        None if math.isnan(rate_hz) else rate_hz,
    )


def _is_table(file: DataFile) -> bool:
    return file.bare_name.endswith(_SUFFIXES)


def _build(files: Sequence[DataFile], wanted: OwnFormat) -> Arrays:
    columns = _columns(files[0], wanted)
    cut, left_out = Cut(wanted.length, wanted.hop, len(columns.channels)), LeftOut(wanted.reading)
    for file in files:
        cut.add(_read(file, wanted, columns, left_out))
    where = files[0].source.where if len(files) > 1 else files[0].where
    if not cut.windows:
        raise UserError(_why_no_window(cut, wanted, where, columns.label))
    people, several = _spelt(set(cut.subjects), cut.spellings[0])
    activities, several_labels = _spelt(set(cut.labels), cut.spellings[1])
    _refuse_other_rates({people[key]: rate_hz for key, rate_hz in cut.rates_of_people().items()}, cut, where)
    names, classes = in_order(people.values()), in_order(activities.values())
    _refuse_names(names, classes, where)
    if not wanted.channels:
        columns = columns.without({
            name: why for k, name in enumerate(columns.channels) if (why := cut.why_no_signal(k))
        })  # fmt: skip
    if not columns.channels:
        reasons = "; ".join(f"{name} {why}" for name, why in columns.left_out.items())
        raise UserError(f"{where}: has no column to use as a channel ({reasons}); choose columns with --channels")
    channels = triplets_first(columns.channels)[0]
    signals = cut.signals([columns.read.index(name) for name in channels])
    labels = _places([activities[key] for key in cut.labels], classes)
    subjects = _places([people[key] for key in cut.subjects], names)
    remarks = [*_table(columns, cut, len(names), len(classes)), *left_out.remarks()]
    remarks += _remarks(cut, [*several, *several_labels])
    return {
        "signals": signals,
        "labels": labels,
        "subjects": subjects,
        # computed before caching, since it reads all windows
        "digest": array_of_texts([digest_of(signals, labels, subjects)]),
        "rate_hz": np.array(cut.rate_hz or math.nan),
        "channels": array_of_texts(channels),
        "classes": array_of_texts(classes),
        "subject_names": array_of_texts(names),
        "remarks": array_of_texts(remarks),
    }


def _spelt(keys: Iterable[str], spellings: Counter[str]) -> tuple[dict[str, str], list[str]]:
    """Maps normalised names to their most frequent spellings; also returns equivalent spellings, such as "1 and 1.0".

    If any name with several spellings is a whole number, all whole numbers are written without decimals.
    """
    written = defaultdict(list)
    for text, _ in sorted(spellings.items(), key=lambda one: (-one[1], one[0])):
        written[key_of_name(text)].append(" ".join(text.split()))
    several = {key: sorted(set(written[key])) for key in in_order(keys) if len(set(written[key])) > 1}
    whole = re.compile(r"[+-]?\d+", re.ASCII)
    as_whole = any(whole.fullmatch(key) for key in several)
    names = {key: key if as_whole and whole.fullmatch(key) else written[key][0] for key in keys}
    return names, [" and ".join(texts) for texts in several.values()]


def _refuse_other_rates(people: Mapping[str, float], cut: Cut, where: str) -> None:
    """Raises UserError if people were recorded at different rates. people: maps names to rows per second."""
    others = defaultdict(list)
    usual_hz = cut.rate_hz
    for name, rate_hz in people.items():
        if usual_hz is not None and not is_same_rate(rate_hz, usual_hz):
            others[f"{rate_hz:.4g}"].append(name)
    if others:
        told = "; ".join(f"{shown(in_order(names))}: {rate} rows per second" for rate, names in others.items())
        raise UserError(
            f"{where}: according to the clock ({', '.join(cut.moments)}), people were recorded at different rates "
            f"({told}; all others: {usual_hz:.4g}), but all windows must have the same duration; resample to one rate, "
            "remove the people named here, or remove the clock column if it is wrong"
        )


def _why_no_window(cut: Cut, wanted: OwnFormat, where: str, label: str) -> str:
    if cut.longest == 0:
        return (
            f"{where}: no row has a label in the column {label}; fill the column in, or choose another with "
            "--label-column"
        )
    return (
        f"{where}: a window has {wanted.length} rows, but the longest uninterrupted activity of one person has "
        f"{cut.longest}; sort the rows by person and time, or choose a smaller --window"
    )


def _table(columns: "_Columns", cut: Cut, num_people: int, num_classes: int) -> list[str]:
    """Formats a table with each column's kind, and with its range or the reason for ignoring it."""
    rate = "" if cut.rate_hz is None else f"{cut.rate_hz:.4g} rows per second, "
    unlabelled = sum(count for text, count in cut.spellings[1].items() if not key_of_name(text))
    rows = [
        (name, "clock", f"cannot be read: {cut.unread[name]}" if name in cut.unread else f"{rate}{first} to {last}")
        for name, (first, last) in cut.moments.items()
    ]
    rows.append((columns.subject, "subject", f"{num_people} people"))
    unlabelled_rows = f"; {unlabelled:,} rows without a label" if unlabelled else ""
    rows.append((columns.label, "label", f"{num_classes} classes{unlabelled_rows}"))
    rows += [(name, "trial", "a new recording begins where this column changes") for name in columns.trials]
    rows += [(name, "left out", why) for name, why in columns.left_out.items()]
    for name in columns.channels:
        k = columns.read.index(name)
        rows.append((name, "channel", f"{cut.lowest[k]:.4g} to {cut.highest[k]:.4g}"))
    return [f"Recordings: {cut.num_rows:,} rows, with these columns:", *overview(("column", "kind", "values"), rows)]


def _remarks(cut: Cut, several: Sequence[str]) -> Iterator[str]:
    if several:
        yield f"These spellings count as one name: {'; '.join(several)}."
    for name, why in cut.unread.items():
        yield (
            f"Warning: the column {name} has the name of a clock, but {why}, so gaps and differing sampling rates are "
            "not detected. Write seconds, or dates such as 2024-05-31T18:30:00.25."
        )
    if others := cut.windows_at_another_rate():
        yield (
            f"Warning: {len(others):,} windows come from recordings whose clock shows another rate, such as "
            f"{others[0]:.4g} rows per second instead of {cut.rate_hz:.4g}. Resample or remove these recordings."
        )
    if cut.num_gaps:
        yield (
            f"Recordings were divided at {cut.num_gaps:,} gaps, where the clock jumps by more than {GAP} times its "
            "usual interval. No window spans a gap."
        )
    if cut.num_disorders:
        yield (
            f"Warning: the clock runs backwards {cut.num_disorders:,} times within recordings. If the rows are out of "
            "order, sort them by time."
        )
    if cut.num_short:
        yield (
            f"Left out: {cut.num_short:,} stretches of one activity that are shorter than a window, with "
            f"{cut.num_short_rows:,} rows in total."
        )
    kept = {*cut.subjects, ""}, {*cut.labels, ""}
    for what, spellings, names in zip(("people", "classes"), cut.spellings, kept, strict=True):
        if lost := {text for text in spellings if key_of_name(text) not in names}:
            yield (
                f"Warning: these {what} have no window: {shown(lost)}. None of their stretches of one activity is as "
                "long as a window; choose a smaller --window, or give longer recordings."
            )


def _places(names: Sequence[str], ordered: Sequence[str]) -> np.ndarray:
    place = {name: i for i, name in enumerate(ordered)}
    return np.array([place[name] for name in names])


@dataclass(frozen=True)
class _Columns:
    """Names of the columns of all files. read: columns to read as numbers. channels: columns to keep as signals.

    left_out: maps the other columns to the reasons why they are not channels.
    """

    subject: str
    label: str
    clocks: tuple[str, ...]
    trials: tuple[str, ...]
    read: tuple[str, ...]
    channels: tuple[str, ...]
    left_out: Mapping[str, str]

    def without(self, left_out: Mapping[str, str]) -> "_Columns":
        """Returns a copy with fewer channels. left_out: maps each channel to remove to the reason."""
        kept = tuple(name for name in self.channels if name not in left_out)
        return replace(self, channels=kept, left_out={**self.left_out, **left_out})


def _columns(file: DataFile, wanted: OwnFormat) -> _Columns:
    """Detects the columns by their names and the first rows of a file. Raises UserError if none can be a channel."""
    with _opened(file, LeftOut(wanted.reading)) as table:
        header, decimal_comma = table.header, table.decimal_comma
        subject, label = _subject_and_label(table, wanted, file)
        first = list(islice(table.lines, ROWS_AT_ONCE))
    if unknown := [name for name in wanted.channels or () if name not in header]:
        known = ", ".join(header) + r" (write a comma in a name as '\,')" * any("," in name for name in header)
        raise UserError(f"--channels {' '.join(unknown)}: {file.where} has no such columns; the columns are {known}")
    roles = roles_of(header, wanted.channels or (), subject, label)
    clocks, trials = [header[i] for i in roles.clocks], [header[i] for i in roles.trials]
    others = [i for i in range(len(header)) if i not in (subject, label, *roles.clocks, *roles.trials)]
    left_out = {}
    if wanted.channels:
        left_out = {header[i]: "not among --channels" for i in others if header[i] not in wanted.channels}
    else:
        clocks += [header[i] for i in others if _shows_moments(first, i, decimal_comma)]
        left_out = {
            header[i]: why for i in others if header[i] not in clocks and (why := why_no_signal(header[i], i, first))
        }
    channels = wanted.channels or tuple(header[i] for i in others if header[i] not in (*clocks, *left_out))
    if not channels:
        raise UserError(
            f"{file.where}: has no column to use as a channel; choose columns with --channels from {', '.join(header)}"
        )
    return _Columns(header[subject], header[label], tuple(clocks), tuple(trials), channels, channels, left_out)


def _shows_moments(lines: Sequence[Line], column: int, decimal_comma: bool) -> bool:
    """Returns whether a column contains dates or times and no numbers."""
    cells = [line for line in lines if len(line[1]) > column and line[1][column].strip()]
    has_number = any(is_number(fields[column].replace(",", ".")) for _, fields in cells)
    return bool(cells) and not has_number and bool(np.isfinite(moments_of(cells, [column], decimal_comma)).any())


@contextmanager
def _opened(file: DataFile, left_out: LeftOut) -> Iterator[CsvTable]:
    with opened_table(file, left_out) as table:
        if not table.header:
            raise UserError(f"{file.where}: is empty; give a CSV with a line of column names")
        if broken := [name for name in table.header if "\n" in name]:
            raise UserError(f"{file.where}: the column name {broken[0]!r} has a line break; rename the column")
        yield table


def _subject_and_label(table: CsvTable, wanted: OwnFormat, file: DataFile) -> tuple[int, int]:
    """Returns indices of the subject and label columns. Raises UserError, with the flags to use, if one is missing."""
    header, found, problems = table.header, [], []
    usual = {"subject": (wanted.subject_column, SUBJECTS), "label": (wanted.label_column, LABELS)}
    for role, (chosen, names) in usual.items():
        if (column := usual_column(header, names, chosen)) is not None:
            found.append(column)
        else:
            problems.append(f"--{role}-column {chosen}" if chosen else f"the {role} (name it with --{role}-column)")
    if problems:
        missing = f"has no column for {' and '.join(problems)}"
        raise UserError(f"{file.where}, line {table.line}: {missing}; the columns are {', '.join(header)}")
    subject, label = found
    if subject == label:
        raise UserError(
            f"{file.where}, line {table.line}: {header[label]} is both the subject and the label; choose another "
            "column with --subject-column or --label-column"
        )
    for column in found:
        if header[column] in (wanted.channels or ()):
            role = "subject" if column == subject else "label"
            raise UserError(
                f"--channels {header[column]}: is the {role} column of {file.where}; leave it out of --channels"
            )
    return subject, label


def _read(file: DataFile, wanted: OwnFormat, columns: _Columns, left_out: LeftOut) -> Rows:
    with _opened(file, left_out) as table:
        subject, label = _subject_and_label(table, wanted, file)
        roles = roles_of(table.header, columns.read, subject, label, columns.clocks)
        rows = read_rows(
            table,
            columns.read,
            roles,
            file.where,
            "fix it, choose channels with --channels, or add --on-bad drop or interpolate",
            left_out,
            needs_subject=True,
        )
    if not len(rows.signals):
        raise UserError(f"{file.where}: has column names, but no readable rows; give at least one row")
    if "" in rows.subjects:
        place = rows.subjects.index("") + 1
        raise UserError(
            f"{file.where}: data row {place} has no subject; fill it in, or leave the row out with --on-bad drop"
        )
    return rows


def _refuse_names(subjects: Sequence[str], classes: Sequence[str], where: str) -> None:
    """Raises UserError for names that flags or tables cannot contain, and for fewer than two classes."""
    for name in subjects:
        if name.startswith("-") or "," in name:
            raise UserError(f"{where}: the subject {name!r} begins with '-' or contains a comma; rename the subject")
    for name in classes:
        if name in _OF_TABLE:
            raise UserError(
                f"{where}: the label {name!r} is also a column of the table that --predict writes; rename the label"
            )
    if len(classes) < 2:
        raise UserError(
            f"{where}: has windows of only one class, {shown(classes)}; give at least two, each with recordings of at "
            "least --window rows"
        )
