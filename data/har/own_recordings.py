"""A user's own recordings: CSV with a subject, a label and any channels, cut into windows."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, groupby, islice, pairwise
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data.csv_lines import CsvTable, csv_table, in_order, plain_name, reading_utf8
from data.files import DataFile, Folder, is_visible, reading_errors, shown, source_at
from data.har.clocks import GAP, clocks_of, is_clock, num_disorders, step_and_gaps
from data.har.recording import ROWS_AT_ONCE, numbers, signal_columns
from data.har.windows import HarRecordings, triplets_first
from trainer.common.errors import BadInput
from trainer.loading.cache import Arrays, array_of_texts, cached_arrays, digest_of, key_of, texts_of_array

_FORMAT_VERSION = 6
_SUFFIXES = (".csv", ".tsv")
_SUBJECTS = ("subject", "person", "participant", "user", "volunteer")
_LABELS = ("label", "activity", "class")
_TRIALS = ("trial", "session")
"""Columns that say, where they change, that another recording begins."""
_NOT_SIGNALS = (*_SUBJECTS, *_LABELS, *_TRIALS, "index", "row", "sample", "unnamed0", "", "id")
"""Columns that are left out where the channels are not named, beside clocks: what a subject, an activity or a row is
called besides."""
_OF_TABLE = ("window", "start_s", "end_s", "activity", "confidence")
"""Columns of the table of `--predict`, which has one for each class too."""


@dataclass(frozen=True)
class OwnFormat:
    """How a user's recordings are read. None: found out by usual names; all other columns, for the channels."""

    subject_column: str | None
    label_column: str | None
    channels: tuple[str, ...] | None
    length: int
    hop: int


@dataclass(frozen=True)
class OwnRecordings:
    """Windows, none of them in the test part yet, and what the user should know of how they were read.

    digest: differs where the windows, their subjects or their classes do. clock_step: by how much the clock usually
    rises from row to row, in its unit; NaN without one.
    """

    recordings: HarRecordings
    remarks: Sequence[str]
    digest: str
    clock_step: float


def are_own(path: Path) -> bool:
    """Whether a path leads to a user's own recordings, not to UCI HAR: a CSV, or a folder with some."""
    if path.is_dir():
        published = ("train", "UCI HAR Dataset", "UCI HAR Dataset.zip")
        with reading_errors(f"--data-dir {path}"):
            has_csv = any(_is_csv(file.name) and is_visible(file.name) for file in path.iterdir() if file.is_file())
            return has_csv and not any((path / p).exists() for p in published)
    return path.is_file() and _is_csv(path.name)


def load_own_recordings(path: Path, cache_dir: Path, wanted: OwnFormat) -> OwnRecordings:
    """Reads recordings and keeps their windows in the cache.

    path: a CSV with a line of names, plain or .gz, or a folder of such files with the same channels. Its rows are in
        the order of time. A run of rows with the same subject and label in one file is one recording, cut into windows
        of `length` rows every `hop` rows; what is left at its end is dropped. Rows without a label belong to none.
        Another recording begins too where a column trial or session changes, and where the clock jumps.

    Channels come in the order of the first file, but x, y and z of a sensor first (`triplets_first`). Subjects and
    classes are in the order of their names, whole numbers by value. Raises BadInput, naming file, line and column.
    """
    path = path.resolve()
    source = source_at(path, depth=1, advice="give a CSV of recordings, or a folder of them")
    files = [DataFile(Folder(path.parent), path.name)] if source is None else [
        file for file in source.files if _is_csv(file.name)
    ]  # fmt: skip
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
    return OwnRecordings(
        recordings, texts_of_array(arrays["remarks"]), texts_of_array(arrays["digest"])[0], float(arrays["clock_step"])
    )


def _is_csv(name: str) -> bool:
    return name.lower().removesuffix(".gz").endswith(_SUFFIXES)


@dataclass
class _Rows:
    """Those of a file: signals (n, C) float32, names of subject, activity and trial of each, and clocks (n, K) float64.

    trials: what stands in the columns that tell one recording from the next. clocks: columns of numbers that are called
    so; NaN where a number is missing.
    """

    signals: np.ndarray
    subjects: list[str]
    labels: list[str]
    trials: list[tuple[str, ...]]
    clocks: np.ndarray


class _Cut:
    """Windows of recordings, (n, C, T) each, whose they are and what is done in them, and what was seen on the way."""

    def __init__(self, wanted: OwnFormat, num_columns: int) -> None:
        self._wanted = wanted
        self.windows: list[np.ndarray] = []
        self.subjects: list[str] = []
        self.labels: list[str] = []
        self.num_short = self.num_short_rows = self.num_disorders = self.num_gaps = 0
        self.longest = 0
        self._clock_steps: list[float] = []
        self._rises, self._falls = np.ones(num_columns, bool), np.zeros(num_columns, bool)

    def add(self, rows: _Rows) -> None:
        """The recordings of a file."""
        for start, stop in self._recordings(rows):
            recording = rows.signals[start:stop]
            self.longest = max(self.longest, stop - start)
            self.num_disorders += num_disorders(rows.clocks[start:stop])
            if stop - start < self._wanted.length:
                self.num_short, self.num_short_rows = self.num_short + 1, self.num_short_rows + stop - start
                continue
            steps = np.diff(recording, axis=0)
            self._rises &= (steps > 0).any(axis=0)
            self._falls |= (steps < 0).any(axis=0)
            windows = sliding_window_view(recording, self._wanted.length, axis=0)[:: self._wanted.hop]
            self.windows.append(windows)
            self.subjects += [rows.subjects[start]] * len(windows)
            self.labels += [rows.labels[start]] * len(windows)

    def _recordings(self, rows: _Rows) -> Iterator[tuple[int, int]]:
        """Where they begin and end: bouts, divided at gaps of the clock."""
        for start, stop in _bouts(rows):
            step, gaps = step_and_gaps(rows.clocks[start:stop])
            self._clock_steps += [] if step is None else [step]
            self.num_gaps += len(gaps)
            yield from pairwise([start, *(start + gaps).tolist(), stop])

    @property
    def clock_step(self) -> float:
        """The median over recordings; NaN where no clock rises."""
        return float(np.median(self._clock_steps)) if self._clock_steps else math.nan

    @property
    def only_rises(self) -> np.ndarray:
        """(C,) bool, which columns rise within each recording, and never fall."""
        return self._rises & ~self._falls

    def signals(self, columns: Sequence[int]) -> np.ndarray:
        """Some columns of all windows, (N, len(columns), T) float32."""
        signals = np.empty((len(self.labels), len(columns), self._wanted.length), np.float32)
        ends = np.cumsum([len(windows) for windows in self.windows])
        for windows, end in zip(self.windows, ends.tolist(), strict=True):
            signals[end - len(windows) : end] = windows[:, columns]
        return signals


def _build(files: Sequence[DataFile], wanted: OwnFormat) -> Arrays:
    named, left_out, (subject, label) = _columns(files[0], wanted)
    cut = _Cut(wanted, len(named))
    for file in files:
        cut.add(_read(file, wanted, named))
    where = files[0].source.where if len(files) > 1 else files[0].where
    if not cut.windows:
        raise BadInput(_why_no_window(cut, wanted, where, label))
    names, classes = in_order(set(cut.subjects)), in_order(set(cut.labels))
    _refuse_names(names, classes, where)
    counted = [] if wanted.channels else list(compress(named, cut.only_rises))
    read = [name for name in named if name not in counted]
    if not read:
        raise BadInput(f"{where}: has no columns of signals, but {', '.join(counted)}, whose numbers only rise")
    channels = triplets_first(read)[0]
    summary = (
        f"Recordings: {len(names)} subjects (column {subject}), {len(classes)} classes (column {label}), channels "
        f"{', '.join(read)}."
    )
    signals = cut.signals([named.index(name) for name in channels])
    labels, subjects = _places(cut.labels, classes), _places(cut.subjects, names)
    return {
        "signals": signals,
        "labels": labels,
        "subjects": subjects,
        # Here, for all windows have to be read for it.
        "digest": array_of_texts([digest_of(signals, labels, subjects)]),
        "clock_step": np.array(cut.clock_step),
        "channels": array_of_texts(channels),
        "classes": array_of_texts(classes),
        "subject_names": array_of_texts(names),
        "remarks": array_of_texts([summary, *_remarks(cut, left_out, counted)]),
    }


def _why_no_window(cut: _Cut, wanted: OwnFormat, where: str, label: str) -> str:
    if cut.longest == 0:
        return f"{where}: no row has a label (column {label}); fill it in, or name another column by --label-column"
    return (
        f"{where}: nobody does one thing for {wanted.length} rows in a row, so that there is no window: the longest "
        f"recording has {cut.longest}; sort the rows by person and time, or choose a smaller --window"
    )


def _remarks(cut: _Cut, left_out: Sequence[str], counted: Sequence[str]) -> Iterator[str]:
    if left_out:
        yield f"Not read: the columns {', '.join(left_out)}; --channels names those that are."
    if counted:
        yield (
            f"Not read: {', '.join(counted)}, whose numbers never fall within a recording, like those of a clock or a "
            "counter; --channels names what is read."
        )
    if cut.num_gaps:
        yield (
            f"Divided at {cut.num_gaps:,} places where the clock jumps by more than {GAP} of its usual steps: no "
            "window reaches over them."
        )
    if cut.num_disorders:
        yield (
            f"Within recordings the clock goes back {cut.num_disorders:,} times: if the rows are out of order, sort "
            "them by time."
        )
    if cut.num_short:
        yield (
            f"Left out: {cut.num_short:,} stretches of one activity that are shorter than a window, "
            f"{cut.num_short_rows:,} rows in all."
        )


def _places(names: Sequence[str], ordered: Sequence[str]) -> np.ndarray:
    place = {name: i for i, name in enumerate(ordered)}
    return np.array([place[name] for name in names])


def _columns(file: DataFile, wanted: OwnFormat) -> tuple[list[str], list[str], list[str]]:
    """The columns that are signals, those that are left out, and those of subject and label."""
    with _opened(file) as table:
        own = [table.header[column] for column in _subject_and_label(table, wanted, file)]
    if unknown := [name for name in wanted.channels or () if name not in table.header]:
        known = ", ".join(table.header)
        raise BadInput(f"--channels {' '.join(unknown)}: {file.where} has no such columns; there are: {known}")
    if wanted.channels:
        return list(wanted.channels), [], own
    others = [name for name in table.header if name not in own]
    channels = [name for name in others if plain_name(name) not in _NOT_SIGNALS and not is_clock(name)]
    if not channels:
        raise BadInput(f"{file.where}: has no columns of signals, only {', '.join(table.header)}")
    return channels, [name for name in others if name not in channels], own


@contextmanager
def _opened(file: DataFile) -> Iterator[CsvTable]:
    with file.open() as content, reading_utf8(file.where, "save it as CSV in UTF-8"):
        table = csv_table(io.TextIOWrapper(content, "utf-8-sig", newline=""), file.where)
        if not table.header:
            raise BadInput(f"{file.where}: is empty; give a CSV with a line of column names")
        yield table


def _subject_and_label(table: CsvTable, wanted: OwnFormat, file: DataFile) -> tuple[int, int]:
    """Their columns. Raises BadInput for those that are not known, with the flags that name them."""
    header, found, problems = table.header, [], []
    usual = {"subject": (wanted.subject_column, _SUBJECTS), "label": (wanted.label_column, _LABELS)}
    for role, (chosen, names) in usual.items():
        as_written, plain = [name.lower() for name in header], [plain_name(name) for name in header]
        columns = [some.index(name) for some in (as_written, plain) for name in names if name in some]
        if chosen is not None:
            columns = [header.index(chosen)] if chosen in header else []
        found += columns[:1]
        if not columns:
            problems.append(f"--{role}-column {chosen}" if chosen else f"the {role} (name it by --{role}-column)")
    if problems:
        missing = f"has no column known as {' and '.join(problems)}"
        raise BadInput(f"{file.where}, line {table.line}: {missing}; there are: {', '.join(header)}")
    subject, label = found
    if subject == label:
        raise BadInput(
            f"{file.where}, line {table.line}: {header[label]} is the subject and the label; name another column by "
            "--subject-column or --label-column"
        )
    for column in found:
        if header[column] in (wanted.channels or ()):
            role = "subject" if column == subject else "label"
            raise BadInput(f"--channels {header[column]}: is the {role} in {file.where}; leave it out")
    return subject, label


def _read(file: DataFile, wanted: OwnFormat, channels: Sequence[str]) -> _Rows:
    with _opened(file) as table:
        line, header, lines, decimal_comma = table
        subject, label = _subject_and_label(table, wanted, file)
        columns = signal_columns(header, channels, f"{file.where}, line {line}")
        parts: list[np.ndarray] = []
        subjects: list[str] = []
        labels: list[str] = []
        trials: list[tuple[str, ...]] = []
        clocks: list[np.ndarray] = []
        taken = (subject, label, *columns)
        trial_columns = [i for i, name in enumerate(header) if plain_name(name) in _TRIALS and i not in taken]
        clock_columns = [i for i, name in enumerate(header) if is_clock(name) and i not in taken]
        advice = "mend it, or name the columns of signals by --channels"
        while some := list(islice(lines, ROWS_AT_ONCE)):
            parts.append(numbers(some, header, columns, file.where, decimal_comma, advice))
            subjects += [fields[subject].strip() for _, fields in some]
            labels += [fields[label].strip() for _, fields in some]
            trials += [tuple(fields[column].strip() for column in trial_columns) for _, fields in some]
            clocks.append(clocks_of(some, clock_columns, decimal_comma))
    if not parts:
        raise BadInput(f"{file.where}: has column names, but no rows; give at least one")
    if "" in subjects:
        raise BadInput(f"{file.where}: row {subjects.index('') + 1} below the names has no subject; mend it")
    return _Rows(np.concatenate(parts), subjects, labels, trials, np.concatenate(clocks))


def _bouts(rows: _Rows) -> Iterator[tuple[int, int]]:
    """Where runs of rows with one subject, label and trial begin and end; those without a label are left out."""
    start = 0
    for (_, label, _), run in groupby(zip(rows.subjects, rows.labels, rows.trials, strict=True)):
        stop = start + sum(1 for _ in run)
        if label:
            yield start, stop
        start = stop


def _refuse_names(subjects: Sequence[str], classes: Sequence[str], where: str) -> None:
    """Raises BadInput for what flags and tables cannot hold, and for too few classes."""
    for name in subjects:
        if name.startswith("-") or "," in name or "\n" in name:
            raise BadInput(
                f"{where}: subject {name!r}: must not begin with '-', nor hold commas or line breaks; rename it"
            )
    for name in classes:
        if name in _OF_TABLE:
            raise BadInput(f"{where}: label {name!r}: is a column of the table of --predict; rename it")
        if "\n" in name:
            raise BadInput(f"{where}: label {name!r}: must not hold a line break; rename it")
    if len(classes) < 2:
        raise BadInput(f"{where}: has windows of {shown(classes)} alone, where two classes at least are needed")
