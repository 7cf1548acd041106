"""Tests that one table in any file format gives the same values, or the format is named."""

import bz2
import gzip
import json
import lzma
import re
import sys
import types

import numpy as np
import pytest

from data.files import single
from data.har.own_recordings import OwnFormat, load_own_recordings
from data.har.recording import read_new_windows
from data.har.windows import WindowFormat
from data.interactions.reader import load_interactions
from data.table_files import LeftOut, Reading, opened_table, tables_at
from data.tabular.reader import read_table
from tests.helpers.archives import tarred, zipped
from tests.helpers.mutations import mutations
from trainer.common.errors import UserError

NAMES = ("user", "item", "time", "x", "activity")
ROWS = [
    (f"Zoë {k // 40}", f"Café {k % 7}", 1_300_000_000 + 60 * k, (k % 13) / 4, ("sit", "walk")[k // 20 % 2])
    for k in range(120)
]


def joined(mark: str) -> str:
    quote = '"' if mark == " " else ""
    lines = [mark.join(NAMES), *(mark.join(f"{quote}{value}{quote}" for value in row) for row in ROWS)]
    return "\n".join(lines) + "\n"


def objects(write=json.dumps) -> str:
    return "".join(write(dict(zip(NAMES, row, strict=True))) + "\n" for row in ROWS)


CSV = joined(",").encode()
FORMS = {
    "t.csv": CSV,
    "t.csv.gz": gzip.compress(CSV),
    "t.csv.bz2": bz2.compress(CSV),
    "t.csv.xz": lzma.compress(CSV),
    "gz_by_content.csv": gzip.compress(CSV),
    "t.csv.zip": zipped({"t.csv": CSV, "__MACOSX/._t.csv": b"x", "README.txt": b"about"}),
    "of_a_folder.zip": zipped({"t.tsv": joined("\t").encode()}),
    "t.tar.gz": tarred({"t.csv": CSV}),
    "pipes.csv": joined("|").encode(),
    "blanks.csv": joined(" ").encode(),
    "excel.csv": joined("\t").encode("utf-16"),
    "wide.csv": joined(",").encode("utf-32"),
    "no_mark.csv": joined(",").encode("utf-16-le"),
    "t.jsonl": objects().encode(),
    "gaps.jsonl": b"\n\n" + objects().encode(),
    "t.json": objects().encode(),
    "steam.jsonl.gz": gzip.compress(objects(repr).encode()),
    "t.jsonl.zip": zipped({"t.jsonl": objects(lambda row: json.dumps(row, ensure_ascii=False)).encode()}),
}


@pytest.fixture(params=FORMS)
def path(request, tmp_path):
    path = tmp_path / request.param
    path.write_bytes(FORMS[request.param])
    return path


def test_every_file_form_gives_the_same_table(path):
    with opened_table(*tables_at(path, "--data-dir", ""), LeftOut()) as table:
        assert tuple(table.header) == NAMES
        numbers, rows = zip(*table.lines, strict=True)
        assert [tuple(row) for row in rows] == [tuple(map(str, row)) for row in ROWS]
        assert list(np.diff(numbers)) == [1] * (len(ROWS) - 1) and numbers[0] == table.line + ("json" not in path.name)


def test_tables_and_interactions_in_any_format_are_read_equally(path, tmp_path):
    if path.name == "blanks.csv":  # interactions separated by blanks cannot be quoted
        path.write_text(path.read_text().replace('"', "").replace("Zoë ", "Zoë").replace("Café ", "Café"))
    items = tuple(f"Café{k}" if "blanks" in path.name else f"Café {k}" for k in range(7))
    columns = {column.name: column.typed() for column in read_table(path).columns}
    assert columns["item"].distinct_texts == list(items)
    assert columns["x"].values.tolist() == [row[3] for row in ROWS]
    found = load_interactions(path, 1, tmp_path / "cache")
    assert found.item_ids == items and found.num_users == 3
    assert found.items.tolist() == [k % 7 + 1 for k in range(120)]
    assert found.times.tolist() == [row[2] for row in ROWS]


def test_recordings_in_any_format_are_read_equally(path, tmp_path):
    if path.name in ("t.json", "t.tar.gz"):
        return
    found = load_own_recordings(path, tmp_path / "cache", OwnFormat(None, None, ("x",), 10, 10)).recordings
    assert found.classes == ("sit", "walk") and found.subject_names == ("Zoë 0", "Zoë 1", "Zoë 2")
    assert found.signals.ravel().tolist() == [row[3] for row in ROWS]
    new = read_new_windows(path, WindowFormat(("x",), ("sit", "walk"), 10, 10, 16.67))
    assert new.signals.ravel().tolist() == [row[3] for row in ROWS]


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16"])
def test_a_given_encoding_is_used(encoding, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(CSV.decode().encode(encoding))
    assert read_table(path, reading=Reading(encoding)).column("user").distinct_texts == ["Zoë 0", "Zoë 1", "Zoë 2"]
    with pytest.raises(UserError, match="--encoding nonsense: no such encoding"):
        read_table(path, reading=Reading("nonsense"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "punycode", "undefined"])
def test_a_file_that_is_not_in_the_given_encoding_is_refused(encoding, tmp_path):
    (tmp_path / "t.csv").write_text("n,y\n" + "1,a\n" * 20)  # an even number of bytes, without byte order mark
    with pytest.raises(UserError, match=f"t.csv: is not text in {encoding}: .*; leave out --encoding, or give another"):
        read_table(tmp_path / "t.csv", reading=Reading(encoding))


WESTERN = [
    "Zürich", "Genève", "São Paulo; Ações", "Ærøskøbing", "Málaga; ¿Qué?", "cœur; l\u2019été; 5 €", "Ça; \u201cà\u201d",
    "acc (m/s²)", "25 °C", "µg", "£5", "Müller 5½ ± 1", "Köln\n" * 90_000,
]  # fmt: skip
OTHERS = {
    "cp1250": ["Łódź", "Paweł Gdańsk", "Dvořák; Žižka", "Petőfi"],
    "cp1251": ["Москва; Казань"],
    "cp1253": ["Αθήνα"],
    "cp1254": ["I\u015f\u0131k; Do\u011fan"],
    "cp850": ["Zürich; André"],
    "mac_roman": ["Zürich; Málaga", "André"],
    "shift_jis": ["東京; 大阪"],
    "gbk": ["北京; 上海"],
}


@pytest.mark.parametrize("text", WESTERN, ids=lambda text: text[:9])
def test_cp1252_is_recognised_and_reported(text, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(f"x\n{text}".encode("cp1252"))
    table = read_table(path)
    assert table.columns[0].distinct_texts[0] in text and "\ufffd" not in str(table.columns[0].texts)
    [note] = table.notes
    assert note.startswith(f"--data-dir {path}: is read in the encoding cp1252, with words such as '")


@pytest.mark.parametrize(("encoding", "text"), [(name, text) for name, texts in OTHERS.items() for text in texts])
def test_text_in_a_possible_other_encoding_is_refused_with_a_suggestion(encoding, text, tmp_path):
    path = tmp_path / "t.csv"
    for content in (
        f"x\n{text}\n".encode(encoding),
        f"x\nKöln\n{text}\n".encode(),
        "x\nCafé 1\n".encode() + b"Z\xfcrich",
    ):
        path.write_bytes(content)
        try:
            found = read_table(path)
        except UserError as error:
            assert re.search(
                r"is not text in UTF-8: the byte 0x.. is invalid; if .*--encoding (cp1252|latin-1)", str(error)
            )
        else:
            assert not found.notes and text in content.decode()


def test_json_numbers_keep_their_digits(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"a": 1.50, "b": true, "c": null}\n\n{"a": 12345678901234567890, "d": [1, "x"], "b": "é"}\nno object\n'
    )
    with opened_table(single(path, "--data-dir"), LeftOut()) as table:
        assert table.header == ["a", "b", "c", "d"]
        assert list(table.lines) == [
            (1, ["1.50", "true", "", ""]),
            (3, ["12345678901234567890", "é", "", '["1", "x"]']),
            (4, ["no object"]),
        ]
    with pytest.raises(UserError, match=r"t.jsonl.*line 4: has 1 fields, .*column names has 4: 'no object'"):
        read_table(path)


class _Parquet:
    """Stands in for the parts of pyarrow.parquet that the reader uses; a file is the mark and a table as JSON."""

    def __init__(self, file):
        content = json.loads(file.read()[4:])
        self.schema_arrow = types.SimpleNamespace(names=content["names"])
        self._rows = content["rows"]

    def iter_batches(self):
        for start in range(0, len(self._rows), 50):
            columns = zip(*self._rows[start : start + 50], strict=True)
            yield types.SimpleNamespace(columns=[types.SimpleNamespace(to_pylist=lambda c=c: c) for c in columns])


def test_parquet_needs_only_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    try:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(dict(zip(NAMES, zip(*ROWS, strict=True), strict=True))), path)
    except ImportError:
        path.write_bytes(b"PAR1" + json.dumps({"names": NAMES, "rows": ROWS}).encode())
        with pytest.raises(UserError, match=f"{path}: is a parquet file, .* the package pyarrow; .*pip install"):
            read_table(path)
        stand_in = types.SimpleNamespace(ParquetFile=_Parquet)
        monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(parquet=stand_in))
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", stand_in)
    test_tables_and_interactions_in_any_format_are_read_equally(path, tmp_path)
    test_recordings_in_any_format_are_read_equally(path, tmp_path)


def test_session_rows_with_event_types_are_read(tmp_path):
    """OTTO publishes such rows."""
    path = tmp_path / "train.jsonl"
    events = [{"aid": k, "ts": 1_661_724_000_000 + 1000 * k, "type": "clicks"} for k in (3, 1, 2)]
    path.write_text("".join(json.dumps({"session": s, "events": events[: s + 2]}) + "\n" for s in range(2)))
    found = load_interactions(path, 1, tmp_path / "cache")
    assert (found.num_users, found.item_ids) == (2, ("1", "2", "3"))
    assert (found.items.tolist(), np.diff(found.times).tolist()) == ([1, 3, 1, 2, 3], [2, -2, 1, 1])


PUBLISHED = {
    "amazon.json": (
        {"reviewerID": "A2", "asin": "B1", "reviewerName": "x", "helpful": [2, 3], "overall": 5.0, "reviewText": "a, b",
         "unixReviewTime": 1_252_800_000, "reviewTime": "09 13, 2009"}, ("A2", "B1", 1_252_800_000),
    ),
    "amazon_2023.jsonl": (
        {"rating": 5.0, "title": "t", "images": [{"small": "u"}, {"small": "v"}], "asin": "B0", "parent_asin": "B9",
         "user_id": "AE", "timestamp": 1_588_687_728_923, "verified_purchase": True}, ("AE", "B0", 1_588_687_728),
    ),
    "yelp_academic_dataset_review.json": (
        {"review_id": "r", "user_id": "mh", "business_id": "XQ", "stars": 3.0, "useful": 0, "text": "\"good\"\n",
         "date": "2018-07-07 22:09:11"}, ("mh", "XQ", 1_531_001_351),
    ),
    "steam_reviews.json": (
        {"username": "Chaos Syren", "hours": 0.1, "products": 41398, "product_id": "725280", "page_order": 0,
         "date": "2017-12-17", "text": "it's"}, ("Chaos Syren", "725280", 1_513_468_800),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_json_lines_of_published_data_sets_are_read(name, tmp_path):
    entry, (user, item, time) = PUBLISHED[name]
    path = tmp_path / name
    line = repr(entry).replace("{'", "{u'", 1) if name.startswith("steam") else json.dumps(entry)
    path.write_text(f"{line}\n")
    found = load_interactions(path, 1, tmp_path / "cache")
    assert (found.item_ids, found.times.tolist()) == ((item,), [time])
    assert any(user in remark for remark in found.remarks)


OTHERS = {
    "Excel's .xlsx": zipped({"[Content_Types].xml": "<x/>", "xl/workbook.xml": "<x/>"}),
    "Excel's .xls": b"\xd0\xcf\x11\xe0" + bytes(99),
    "ARFF": "% about\n%\n@RELATION iris\n@ATTRIBUTE x NUMERIC\n@DATA\n1\n",
    "a JSON array": '[\n  {"a": 1}\n]\n',
    "JSON of several lines": '{\n  "a": 1\n}\n',
    "libsvm's sparse rows": "+1 1:0.5 7:1\n-1 2:0.25\n",
    "XML or HTML": "<!DOCTYPE html>\n<html>\n",
    "sktime's .ts": "#about\n@problemName Walk\n",
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "an SQLite database": b"SQLite format 3\0",
    "Feather or Arrow": b"ARROW1\0\0",
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("name", ["t.csv", "t.bin"])
def test_other_formats_are_refused_by_name(what, name, tmp_path):
    path, content = tmp_path / name, OTHERS[what]
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    readers = [
        lambda: read_table(path),
        lambda: read_table(path, "--predict"),
        lambda: load_interactions(path, 1, tmp_path / "cache"),
        lambda: read_new_windows(path),
    ]
    for read in readers:
        with pytest.raises(
            UserError, match=rf"{path}.*: is {what}, which cannot be read .*docs/formats.md#[a-z-]+ shows"
        ):
            read()


@pytest.mark.parametrize("mark", ["%", "#"])
def test_a_line_of_many_comment_marks_is_read_at_once(mark, tmp_path):
    (tmp_path / "t.csv").write_text(f"{mark} " * 100 + "\n1\n")
    with opened_table(single(tmp_path / "t.csv", "--data-dir"), LeftOut()) as table:
        assert set(table.header) == {mark}


def test_the_right_file_of_training_and_test_archives_is_read(tmp_path):
    path = tmp_path / "titanic.zip"
    members = {"test.csv": "x\n1\n", "train.csv": "x,y\n2,a\n", "gender_submission.csv": "x,y\n3,b\n"}
    path.write_bytes(zipped(members))
    for flag, text in (("--data-dir", "2"), ("--predict", "1"), ("--test-data", "1")):
        assert read_table(path, flag).column("x").distinct_texts == [text]


def test_archives_of_no_or_several_tables_are_refused(tmp_path):
    for members in ({}, {"a.csv": CSV, "b.csv": CSV}):
        path = tmp_path / "t.zip"
        path.write_bytes(zipped(members))
        with pytest.raises(UserError, match=rf"{len(members)} of its files could be the table; give the path of one"):
            read_table(path)


@pytest.mark.parametrize("name", ["t.jsonl", "steam.jsonl", "pipes.csv", "excel.csv", "t.csv.bz2", "t.csv.zip"])
def test_damaged_files_are_read_or_refused(name, tmp_path):
    rows, whole = ROWS[:6], {"t.jsonl": json.dumps, "steam.jsonl": repr}.get(name)
    if whole is None:
        content = FORMS[name]
    else:
        content = "".join(whole(dict(zip(NAMES, row, strict=True))) + "\n" for row in rows).encode()
    path = tmp_path / name
    for damaged in mutations(content, 40, seed=3):
        path.write_bytes(damaged)
        for read in (
            lambda: read_table(path),
            lambda: load_interactions(path, 1, tmp_path / "cache", reading=Reading(on_bad="drop")),
            lambda: read_new_windows(path, WindowFormat(("x",), ("a",), 2, 1, 16.67), reading=Reading(on_bad="drop")),
        ):
            try:
                read()
            except UserError as error:
                assert "\n" not in str(error)


def test_lone_surrogates_and_odd_names_are_not_parsed_as_objects(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": "x"}\n{"a": "\\ud800"}\n{\'a\': {(1, 2): 3}}\n{[]: 1}\n{"a": "\\ud83d\\ude00"}\n')
    with opened_table(single(path, "--data-dir"), LeftOut()) as table:
        assert [fields for _, fields in table.lines] == [["x"], ['{"a": "\\ud800"}'], ["{}"], ["{[]: 1}"], ["😀"]]
