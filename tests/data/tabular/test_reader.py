import io
import os
from pathlib import Path

import numpy as np
import pytest

from data.tabular import reader as module
from data.tabular.reader import read_table
from data.tabular.table import Column, Table
from tests.helpers.archives import zipped
from trainer.common.errors import UserError

PLAIN = "age,town,y\n31,Rome,a\n42,Oslo,b\n,Rome,a\n"


def values(table: Table, name: str) -> list:
    """Returns the values that a column is learned from, None where one is missing."""
    column = table.column(name).typed()
    texts = column.texts
    rows = column.values.tolist()
    return [None if np.isnan(row) else row if texts is None else texts[int(row)] for row in rows]


def assert_is_the_table(table: Table) -> None:
    assert table.names == ("age", "town", "y")
    assert values(table, "age") == [31, 42, None]
    assert values(table, "town") == ["Rome", "Oslo", "Rome"]
    assert values(table, "y") == ["a", "b", "a"]


# File formats


def test_cells_may_contain_separators_quotes_and_line_breaks(read) -> None:
    table = read('x,y\n"a,b",1\n"say ""no""",2\n"two\nlines",3\n')
    assert values(table, "x") == ["a,b", 'say "no"', "two\nlines"]


@pytest.mark.parametrize("missing", ["", "?", "NA", "NaN", "null", "nan", "<NA>", '""', "  "])
def test_every_spelling_of_a_missing_value_is_recognised(read, missing) -> None:
    table = read(f"n,t,y\n1,p,a\n{missing},{missing},b\n3,q,a\n")
    assert values(table, "n") == [1, None, 3] and values(table, "t") == ["p", None, "q"]


def test_unnamed_columns_are_called_by_position(read) -> None:
    assert read(",x,\n0,1,2\n").names == ("unnamed 1", "x", "unnamed 3")


def test_rows_may_cross_blocks(read, monkeypatch) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 2)
    assert_is_the_table(read(PLAIN.rstrip()))
    with pytest.raises(UserError, match="line 5: has 2 fields"):
        read(PLAIN + "1,2\n")


# Types of columns


def test_a_column_with_95_percent_numbers_is_numeric(read) -> None:
    def column(num_numbers: int) -> list:
        return values(read("x,y\n" + "1.5,a\n" * num_numbers + "no,b\n" + ",b\n" * 7), "x")

    assert column(19)[18:21] == [1.5, None, None]
    assert column(18)[17:20] == ["1.5", "no", None]


@pytest.mark.parametrize("text", ["1", "-1.", "+.5", "1e-3", "1E5", "007"])
def test_numbers_are_parsed(read, text) -> None:
    assert values(read(f"x,y\n{text},a\n"), "x") == [float(text)]


@pytest.mark.parametrize("text", ["1_000", "0x1f", "1e", "True", "1 00", "infinite", "1" * 65])
def test_text_that_resembles_numbers_is_not_parsed(read, text) -> None:
    assert values(read(f"x,y\n{text},a\n"), "x") == [text]


@pytest.mark.parametrize("text", ["inf", "-Infinity", "1e999", "2e100"])
def test_infinite_numbers_are_missing_values(read, text) -> None:
    column = read(f"x,y\n1.5,a\n{text},b\n{text},c\n").column("x").typed()
    assert column.texts is None
    np.testing.assert_array_equal(column.values, [1.5, np.nan, np.nan])


@pytest.mark.parametrize(
    ("text", "is_date"),
    [
        ("2024-05-31", True),
        ("2024/5/31", True),
        ("31.05.2024", True),
        ("5/31/24", True),
        ("2024-05-31T12:30:00Z", True),
        ("2024-05-31 12:30:00.25 +0100", True),
        ("5/31/2024 1:05 PM", True),
        ("20240531", False),
        ("1.5", False),
        ("12:30", False),
        ("2024-05-31x", False),
        ("192.168.1.1", False),
    ],
)
def test_dates_are_recognised(read, text, is_date) -> None:
    assert read(f"x,y\n{text},a\n,b\n").column("x").typed().is_date() == is_date


# Arrays


def test_arrays_of_numbers_are_read(read_arrays) -> None:
    features = np.array([[1, 2.5], [np.nan, np.inf]], np.float32)
    table = read_arrays(X=features, y=np.array([3, 1]))
    assert table.names == ("x0", "x1", "y")
    assert values(table, "x0") == [1, None] and values(table, "x1") == [2.5, None]
    assert table.column("y").distinct_texts == ["1", "3"]


def test_arrays_of_strings_and_names_are_read(read_arrays) -> None:
    table = read_arrays(X=np.array([["1", "p"], ["2", ""]]), names=np.array(["n", "t"]))
    assert table.names == ("n", "t")
    assert values(table, "n") == [1, 2] and values(table, "t") == ["p", None]


def test_arrays_in_memory_may_have_any_values() -> None:
    times = np.array(["2024-05-31T12:30", "NaT", "2024-06-01"], "datetime64[ns]")
    columns = {
        "mixed": np.array([1, "2", None], dtype=object),
        "texts": np.array(["a", np.nan, True], dtype=object),
        "truths": np.array([True, False, True]),
        "times": times,
    }
    table = Table("X", tuple(Column.of_values(name, array) for name, array in columns.items()))
    assert values(table, "mixed") == [1, 2, None] and values(table, "texts") == ["a", None, "True"]
    assert values(table, "truths") == ["True", "False", "True"]
    assert table.column("times").is_date() and table.column("times").is_missing.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(2)}, "has no array X \\(arrays: a\\);"),
        ({"X": np.zeros(2)}, r"X has type float64 and shape \(2,\)"),
        ({"X": np.zeros((2, 2), complex)}, "X has type complex128"),
        ({"X": np.zeros((2, 2)), "y": np.zeros(3)}, "X has 2 rows, but y has 3"),
        ({"X": np.zeros((2, 2)), "y": np.zeros((2, 1))}, r"y has type float64 and shape \(2, 1\)"),
        ({"X": np.zeros((2, 2)), "names": np.array(["a"])}, "X has 2 columns, but names has 1 entries"),
        ({"X": np.zeros((2, 2)), "names": np.array(["a", "a"])}, "more than one column is named 'a'"),
        ({"X": np.zeros((2, 1)), "y": np.zeros(2), "names": np.array(["y"])}, "more than one column is named 'y'"),
        ({"X": np.zeros((0, 2))}, "no rows"),
        ({"X": np.zeros((2, 0))}, "X has 0 columns"),
        ({"X": np.zeros((1, 1001))}, "1,001 columns, but at most 1,000 are supported"),
        ({"X": np.array([[object()]])}, "contains Python objects; no code in the file was run"),
    ],
)
def test_arrays_that_are_not_tables_are_refused(read_arrays, arrays, message) -> None:
    with pytest.raises(UserError, match="^--data-dir .*t.npz: .*" + message) as caught:
        read_arrays(**arrays)
    assert "\n" not in str(caught.value)


def test_damaged_arrays_are_refused(read, tmp_path) -> None:
    np.savez(tmp_path / "whole.npz", X=np.arange(1000.0).reshape(10, 100))
    whole = (tmp_path / "whole.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    for content, message in {
        b"": "is not an .npz file",
        zipped({"X": b"text"}): r"is damaged \(X is not an array\)",
        b"text": "is not an .npz file",
        whole[:500]: "",
        bytes(flipped): "",
        single.getvalue(): "is not an .npz file",
    }.items():
        with pytest.raises(UserError, match=rf"^--data-dir .*t.npz: {message}"):
            read(content, "t.npz")


# Invalid files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"is empty; give a CSV"),
        ("\n \n", r"is empty"),
        ("a,b\n", r"has column names, but no rows"),
        ("a,b\n1,2\n\n1,2,3\n", r"line 4: has 3 fields, but the line of column names has 2: '1,2,3'"),
        ("a,b\n1,2\n1\n", r"line 3: has 1 fields, but .*: '1'; fix the line, or add"),
        ('{"a": 1, "b": 2}\n{"a": [\n', r"line 2: is not a JSON object: '{\"a\": \['; fix the line, or add"),
        ('{"a": [\n', r"begins with no JSON object; give a CSV"),
        (b"\0" * 50, r"begins with 50 zero bytes"),
        ('a,b\n"x\ny",2\n1\n', r"line 4: has 1 fields, but"),
        ("a,b,a\n1,2,3\n", r"more than one column is named 'a'"),
        ("7,0,0,a\n", r"line 1: has numbers instead of column names"),
        ("1,2.5\n3,4\n", r"line 1: has numbers instead of column names"),
        ('a,b\n"x,2\n3,4\n', r"line 2: a quotation mark opens but never closes"),
        ('a,b\n"x"z,2\n', r"line 2: .*expected after"),
        (b"a,b\n\xff\xfe,1\n", r"is not text in UTF-8: the byte 0xff is invalid"),
        (
            ",".join(f"c{i}" for i in range(10_000)) + "\n",
            r"line 1: has 10,000 columns, but at most 1,000 are supported, .*square",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_line_and_reason(read, content, message) -> None:
    with pytest.raises(UserError, match=r"^--data-dir .*t.csv(, |: ).*" + message) as caught:
        read(content)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_paths_without_a_table_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"^--predict .*none.csv: no such file or folder; give a CSV"):
        read_table(tmp_path / "none.csv", "--predict")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "t.csv").write_text("a,y\n1,2\n")
    with pytest.raises(UserError, match=r"0 of its files could be the table; .*found: inside/t.csv$"):
        read_table(tmp_path)


# The real data


def real(name: str) -> Path:
    folder = os.environ.get("LOCKSTEP_DATA")
    path = Path(folder or "", "tabular", name)
    if not folder or not path.is_file():
        pytest.skip(f"set LOCKSTEP_DATA to a folder with tabular/{name}")
    return path


def test_a_real_table_with_semicolons_and_quotes_is_read() -> None:
    table = read_table(real("bank_additional_full.semicolon.csv.gz"))
    assert (table.num_rows, len(table.columns)) == (41188, 21)
    assert np.bincount(table.column("y").values.astype(int)).tolist() == [36548, 4640]
    assert sum(column.typed().texts is None for column in table.columns) == 10
    assert not any(column.is_missing.any() for column in table.columns)


def test_a_real_table_with_missing_values_is_read() -> None:
    table = read_table(real("titanic.csv"))
    assert sum(int(column.is_missing.sum()) for column in table.columns) == 869
    assert table.column("age").typed().texts is None
    assert table.column("adult_male").typed().texts == ("False", "True")
