"""Detects the format of table files and reads their lines as fields."""

import ast
import codecs
import importlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any, Literal, cast

from data.csv_lines import CsvTable, Line, csv_lines, delimiter_of
from data.files import DataFile, Folder, not_read, shown, single, source_at
from trainer.common.errors import UserError
from trainer.common.files import lines_of

OnBad = Literal["refuse", "drop", "interpolate"]
TABLES = (".csv", ".tsv", ".txt", ".dat", ".data", ".inter", ".jsonl", ".ndjson", ".json", ".parquet")
"""Suffixes of the names of table files, before any compression suffix."""
_BINARY = {
    b"\xd0\xcf\x11\xe0": ("Excel's .xls", "excel"),
    b"\x89HDF": ("HDF5", "other-formats"),
    b"ARROW1": ("Feather or Arrow", "other-formats"),
    b"ORC": ("ORC", "other-formats"),
    b"Obj\x01": ("Avro", "other-formats"),
    b"SQLite format 3": ("an SQLite database", "other-formats"),
    b"\x93NUMPY": ("a NumPy array", "other-formats"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "other-formats"),
}
"""Maps a file's first bytes to its format and to the section of docs/formats.md that shows how to convert it."""
_TEXTS = {
    r"(?i)\s*(%[^\r\n]*[\r\n]\s*)*@relation\b": ("ARFF", "arff"),
    r"(?i)\s*(#[^\r\n]*[\r\n]\s*)*@problemname\b": ("sktime's .ts", "other-formats"),
    r"(?i)\s*<(\?xml|!doctype|html|\w+>?\s*$)": ("XML or HTML", "other-formats"),
    r"\s*\[\s*([\[{]|$)": ("a JSON array", "json"),
    r"\s*\{\s*$": ("JSON of several lines", "json"),
    r"\s*[-+]?\d+(\.\d+)?( \d+:[-+\d.eE]+)+\s*$": ("libsvm's sparse rows", "other-formats"),
}
"""Maps patterns that match a file's beginning to its format and to the format's section of docs/formats.md."""
_LISTS = ("events", "interactions", "actions", "clicks", "items")
"""Names of JSON entries that contain a list of records, such as the events of a session."""
_UTF_8 = "utf-8-sig"
_LETTERS = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÖØÙÚÛÜßàáâãäåæçèéêëìíîïñòóôõöøùúûüŒœ".encode("cp1252")
_MARKS = rb"\x80\x82\x84\x85\x91-\x97\x99\xa0\xa1\xa3\xa7\xa9-\xab\xae\xb0-\xb3\xb5\xb7\xba\xbb\xbd\xbf\xd7"
_NOT_WESTERN = re.compile(
    rb"[^ A-Za-z%b]|[%b]{3}|[\xc2\xc3][\x80-\xbf]|\xf5(?!e)|[A-Za-lo-ru-z][\xb2\xb3]"
    rb"|[A-Za-z][^\x00-\x7f\xb7\x92%b][A-Za-z]" % (_LETTERS + _MARKS, _LETTERS, _LETTERS)
)
"""Matches bytes that do not occur in Western European words in cp1252, such as UTF-8 sequences."""
_WESTERN = re.compile(
    rb"[A-Za-z][%b]|[%b][A-Za-z]|\xb0[CF]\b|\b[km]?[ms][\xb2\xb3]|\xb5[A-Zgms]|[\x80\xa3] ?\d|\d ?\x80"
    % (_LETTERS, _LETTERS)
)
"""Matches bytes that indicate cp1252: an accented letter next to an ASCII letter, a unit or a price."""
_NOT_ASCII = re.compile(rb"[A-Za-z]?[\x80-\xff]+[A-Za-z]?")
_PART = re.compile(r"(?<![a-z])(train|val|dev|test)(?:ing|id|idation)?(?![a-z])")
_FIRST_OBJECTS = 1000
_HEAD, _CHUNK = 4096, 1 << 18


@dataclass(frozen=True)
class Reading:
    """Options for reading tables. encoding: text encoding, or None to detect it. on_bad: how to treat bad lines."""

    encoding: str | None = None
    on_bad: OnBad = "refuse"


STRICT = Reading()


@dataclass
class LeftOut:
    """Counts input that is dropped or filled in, and notes a detected encoding.

    found: maps (action, kind of input) to (count, first example); an action is, for example, "Left out". note: a
    sentence about the encoding, or "".
    """

    reading: Reading = STRICT
    found: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    note: str = ""

    def add(self, first: str, refusal: str, kind: str = "lines that cannot be read") -> None:
        """Counts unreadable input or, if `on_bad` is "refuse", raises UserError(refusal). first: example to show."""
        if self.reading.on_bad == "refuse":
            raise UserError(refusal)
        self.count(kind, first)

    def count(self, kind: str, first: str, num: int = 1, action: str = "Left out") -> None:
        """Adds `num`, which may be 0, to the count of a kind of input."""
        before, first = self.found.get((action, kind), (0, first))
        if before + num:
            self.found[action, kind] = before + num, first

    def counts(self) -> dict[str, int]:
        """Returns how many inputs of each kind there are; a key describes the kind and shows its first example."""
        return {f"{kind}, such as {first}": num for (_, kind), (num, first) in self.found.items()}

    def remarks(self) -> list[str]:
        """Returns sentences for the user on the encoding and on dropped or filled-in input."""
        found = [f"{action}: {num:,} {kind}, such as {first}." for (action, kind), (num, first) in self.found.items()]
        return [self.note, *found] if self.note else found


ENCODING = "text encoding, such as cp1252 or latin-1 (default: UTF-8, UTF-16 or, if neither fits, cp1252)"
ON_BAD = "what to do with unreadable lines, also for --predict; refuse: stop with an error; drop: skip and report them"


def tables_at(path: Path, flag_name: str, advice: str, known: Sequence[str] = ()) -> list[DataFile]:
    """Finds the table at a path: the file itself, the only table in a folder or archive, or one file for each split.

    known: file names to prefer. Raises UserError if there is no table, or if it is unclear which table to read.
    """
    source = source_at(path, 1, advice, flag_name)
    if source is None:
        return [single(path, flag_name)]
    found = [file for file in source.files if file.bare_name in known]
    found = found or parts_of(source.files) or [
        file for file in source.files if file.bare_name.endswith(TABLES) and not file.bare_name.startswith("readme")
    ]  # fmt: skip
    if len(found) != 1 and not parts_of(found):
        raise UserError(
            f"{source.where}: {len(found)} of its files could be the table; give the path of one file (if it is in an "
            "archive, unpack it first); files found: "
            f"{shown(file.name for file in source.files or Folder(path, depth=3).files)}"
        )
    return found


def parts_of(files: Iterable[DataFile]) -> list[DataFile]:
    """Returns the files for training, validation (optional) and test; [] if there are no such files.

    The names of these files contain train, val, dev or test, as in train.csv, x.valid.inter and test.txt.
    """
    found: dict[str, list[DataFile]] = {"train": [], "val": [], "dev": [], "test": []}
    for file in files:
        if file.bare_name.endswith(TABLES) and (part := _PART.search(file.bare_name)):
            found[part[1]].append(file)
    train, val, test = found["train"], found["val"] + found["dev"], found["test"]
    return [*train, *val, *test] if len(train) == len(test) == 1 and len(val) <= 1 else []


Split = Callable[[str, Iterator[str], str], Iterator[Line]]
"""Splits the lines of a file into fields: (first non-blank line, all lines, file name in messages) -> `Line`s."""


@contextmanager
def opened_lines(file: DataFile, left_out: LeftOut, split: Split) -> Iterator[Iterator[Line]]:
    """Opens a file as lines of fields; for JSON lines and parquet, the first line contains the column names.

    Raises UserError if the file cannot be read.
    """
    encoding = left_out.reading.encoding
    if encoding is None:
        with file.open() as content:
            encoding = _recognised(content, file.where, left_out)
    with file.open() as content:
        head = cast(io.BufferedReader, content).peek(_HEAD)[:_HEAD]
        if head.startswith(b"PAR1"):
            yield _parquet_lines(content, file.where)
            return
        for start, (what, section) in _BINARY.items():
            if head.startswith(start):
                raise not_read(file.where, what, section)
        with _opened_text(content, file.where, encoding) as text:
            yield _lines(lines_of(text), file.where, split)


@contextmanager
def opened_table(file: DataFile, left_out: LeftOut) -> Iterator[CsvTable]:
    """Opens a table whose first line names the columns.

    If semicolons separate the columns, numbers may have decimal commas.
    """
    found: list[str] = []

    def split(first: str, text: Iterator[str], where: str) -> Iterator[Line]:
        found.append(delimiter_of(first))
        return csv_lines(text, found[0], where)

    with opened_lines(file, left_out, split) as lines:
        line, names = next(lines, (0, []))
        yield CsvTable(line, [name.strip() for name in names], lines, found == [";"])


def decoded(content: bytes, where: str, left_out: LeftOut) -> str:
    """Decodes the content of a file and keeps line endings. Raises UserError for invalid bytes."""
    encoding = left_out.reading.encoding or _recognised(io.BytesIO(content), where, left_out)
    with _opened_text(io.BytesIO(content), where, encoding) as text:
        return text.read()


@contextmanager
def _opened_text(content: IO[bytes], where: str, encoding: str) -> Iterator[IO[str]]:
    try:
        name = codecs.lookup(encoding).name
        text = io.TextIOWrapper(content, "utf-8-sig" if name == "utf-8" else name, newline="")
    except LookupError:
        raise UserError(
            f"--encoding {encoding}: no such encoding; give a known encoding, such as cp1252 or utf-16"
        ) from None
    try:
        yield text
    except UnicodeError as error:  # some encodings raise no UnicodeDecodeError, such as utf-16 without byte order mark
        raise UserError(f"{where}: {_why_no_text(error, encoding)}") from None


def _why_no_text(error: UnicodeError, encoding: str) -> str:
    is_given = encoding != _UTF_8
    if not isinstance(error, UnicodeDecodeError):
        return f"is not text in {encoding}: {error}; leave out --encoding, or give another encoding"
    byte = error.object[error.start]
    reason = f"is not text in {encoding if is_given else 'UTF-8'}: the byte 0x{byte:02x} is invalid"
    if is_given or b"\0" in error.object:
        return f"{reason}; " + (
            "leave out --encoding, or give another encoding" if is_given else "give a text file, such as a CSV"
        )
    likely = "latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", error.object) else "cp1252"
    word = _word_at(error.object, error.start, likely)
    return f"{reason}; if {word!r} is a correct word, add --encoding {likely}; otherwise save the file in UTF-8"


def _word_at(content: bytes, place: int, encoding: str) -> str:
    before, after = (re.split(rb"[\s,;|\t\"]", part) for part in (content[:place], content[place : place + 20]))
    return (before[-1][-20:] + after[0]).decode(encoding, "replace")


def _recognised(content: IO[bytes], where: str, left_out: LeftOut) -> str:
    """Detects a file's encoding, if necessary by reading the whole file; if it is cp1252, notes this in `left_out`.

    UTF-16 and UTF-32 begin with a byte order mark; UTF-16 may instead have zero bytes at more than 70 % of either the
    even or the odd positions. A file that is not UTF-8 is read as cp1252 if at least one word looks Western European
    and no word looks otherwise. Raises UserError for zero bytes only.
    """
    chunk = content.read(_CHUNK)
    if chunk.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if chunk and not chunk.strip(b"\0"):
        raise UserError(f"{where}: begins with {len(chunk):,} zero bytes; copy or download the file again")
    if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = [chunk[start:_HEAD:2].count(0) / max(1, len(chunk[:_HEAD]) // 2) for start in (0, 1)]
    if max(zeros) > 0.7 > min(zeros):
        return "utf-16-be" if zeros[0] > 0.7 else "utf-16-le"
    decoder, is_utf_8, is_western, word = codecs.getincrementaldecoder("utf-8")("replace"), True, True, None
    while chunk and (is_utf_8 or is_western):
        is_utf_8 = is_utf_8 and ("\ufffd" not in decoder.decode(chunk) or b"\xef\xbf\xbd" in chunk)
        if is_western and not chunk.isascii():
            is_western = b"\0" not in chunk and not _NOT_WESTERN.search(b" ".join(set(_NOT_ASCII.findall(chunk))))
            word = word or ((found := _WESTERN.search(chunk)) and _word_at(chunk, found.start(), "cp1252"))
        chunk = content.read(_CHUNK)
    if (is_utf_8 and not decoder.getstate()[0]) or not is_western or word is None:
        return _UTF_8
    left_out.note = (
        left_out.note
        or f"{where}: is read in the encoding cp1252, with words such as {word!r}; if these are wrong, add --encoding."
    )
    return "cp1252"


def _lines(text: Iterator[str], where: str, split: Split) -> Iterator[Line]:
    """Yields the fields of non-blank lines with their line numbers. Raises UserError for unsupported formats."""
    num_blank, first = next(((i, line) for i, line in enumerate(text) if not line.isspace()), (0, ""))
    if not first:
        return iter(())
    if first[0] in "@%#[<{ -+0123456789":
        start = [first, *islice(text, 30)] if first[0] in "%#" else [first]
        for pattern, (what, section) in _TEXTS.items():
            if re.match(pattern, "".join(start)):
                raise not_read(where, what, section)
        text = chain(start[1:], text)
    lines = chain(["\n"] * num_blank, [first], text)
    return json_lines(lines) if first.lstrip().startswith("{") else split(first, lines, where)


def json_lines(text: Iterator[str]) -> Iterator[Line]:
    """Yields the keys of the first thousand JSON objects as column names, then the values of each object.

    The text has one object per line. Missing values become ""; a line that is not an object becomes a single field.
    An object that contains a list of records yields one line per record.
    """
    objects = ((number, line, _object(line)) for number, line in enumerate(text, start=1) if not line.isspace())
    if not (first := list(islice(objects, _FIRST_OBJECTS))):
        return
    names = list(dict.fromkeys(name for _, _, entries in first for record in entries for name in record))
    yield first[0][0], names
    for number, line, entries in chain(first, objects):
        if not entries:
            yield number, [line.strip()]
        for record in entries:
            yield number, [text_of(record.get(name)) for name in names]


def _object(line: str) -> list[dict[str, Any]]:
    """Parses a line in JSON, or in the Python syntax of Steam's data sets, into records; returns [] for other lines."""
    try:
        found = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(line.strip()) if line.lstrip().startswith(("{'", "{u'")) else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found = None
    if not isinstance(found, dict) or ("\\u" in line and not _can_be_written(found)):
        return []
    found = {str(name): value for name, value in found.items()}
    for name in _LISTS:
        if isinstance(inner := found.get(name), list) and all(isinstance(record, dict) for record in inner):
            rest = {key: value for key, value in found.items() if key != name}
            return [rest | record for record in inner] or [rest]
    return [found]


def _can_be_written(value: Any) -> bool:
    """Returns whether UTF-8 can encode a value; it cannot encode the lone surrogates that JSON escapes can produce."""
    return re.search(r"\\ud[89a-f]", repr(value)) is None


def text_of(value: Any) -> str:
    """Formats a value as a CSV cell: None as "", and true, false, lists and objects as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return json.dumps(value, default=str, skipkeys=True) if isinstance(value, bool | list | dict) else str(value)


def _parquet_lines(content: IO[bytes], where: str) -> Iterator[Line]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # imported by name, since it is optional
    except ImportError:
        raise UserError(
            f"{where}: is a parquet file, which requires the package pyarrow; run `pip install pyarrow`, or save "
            "the table as CSV"
        ) from None
    try:
        file = parquet.ParquetFile(content)
        yield 1, list(file.schema_arrow.names)
        numbers = count(2)
        for batch in file.iter_batches():
            columns = [[text_of(value) for value in column.to_pylist()] for column in batch.columns]
            yield from ((next(numbers), list(fields)) for fields in zip(*columns, strict=True))
    except ValueError as error:  # pyarrow's errors are ValueErrors
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where}: damaged parquet file ({str(error)[:80]}); download it again") from None
