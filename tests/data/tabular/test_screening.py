"""What of a table is learned from, what its owner is told, and labels that are none."""

import numpy as np
import pytest

from data.tabular.reader import MOST_COLUMNS
from data.tabular.screening import LabelledTable, labelled_table
from trainer.common.errors import BadInput

NUM_ROWS = 40
USEFUL = [i * 7 % 11 for i in range(NUM_ROWS)]
LABELS = ["yes" if i % 3 else "no" for i in range(NUM_ROWS)]


@pytest.fixture
def screen(read):
    """A table with the column `useful`, the label `y` and others."""

    def run(drop=(), label="y", **columns) -> LabelledTable:
        columns = {"useful": USEFUL, **columns, **({} if "y" in columns else {"y": LABELS})}
        lines = zip(*columns.values(), strict=True)
        content = ",".join(columns) + "\n" + "".join(",".join(map(str, line)) + "\n" for line in lines)
        return labelled_table(read(content), label, drop)

    return run


def test_nothing_is_said_of_a_plain_table(screen) -> None:
    table = screen(town=["Rome", "Oslo"] * 20)
    assert table.features.names == ("useful", "town") and table.notes == ()
    assert table.labels.classes == ("no", "yes")
    assert table.labels.values.tolist() == [int(label == "yes") for label in LABELS]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([""] * NUM_ROWS, "no value in any row"),
        (["x"] * NUM_ROWS, "the same value in every row"),
        ([3.5] * NUM_ROWS, "the same value in every row"),
        ([f"2024-05-{1 + i % 28:02}" for i in range(NUM_ROWS)], "dates, which are not understood"),
        ([f"name {i}" for i in range(NUM_ROWS)], "a different value in every row"),
        (["twice", *(f"name {i}" for i in range(1, NUM_ROWS - 1)), "twice"], "a different value in every row"),
        ([100 + i * 3 % NUM_ROWS for i in range(NUM_ROWS)], "a different value in every row"),
    ],
)
def test_columns_that_are_left_out_and_why(screen, values, reason) -> None:
    table = screen(other=values)
    assert table.features.names == ("useful",)
    assert len(table.notes) == 1 and table.notes[0].startswith(f"Left out: other ({reason}")


@pytest.mark.parametrize(
    "values",
    [
        ["x", "", *["x"] * (NUM_ROWS - 2)],
        [i * 2 for i in range(NUM_ROWS)],
        [i / 2 for i in range(NUM_ROWS)],
        [0, 0, *range(2, NUM_ROWS)],
        [f"name {i // 2}" for i in range(NUM_ROWS)],
        [20240501 + i % 28 for i in range(NUM_ROWS)],
    ],
    ids=["constant but missing once", "even numbers", "halves", "a number twice", "texts twice", "dates as numbers"],
)
def test_columns_that_look_alike_and_are_kept(screen, values) -> None:
    table = screen(other=values)
    assert table.features.names == ("useful", "other") and table.notes == ()


@pytest.mark.parametrize("name", ["id", "customer_id", "PassengerId", "user ID", "UUID"])
def test_whole_numbers_with_gaps_are_an_id_by_name(screen, name) -> None:
    numbers = [i * i for i in range(NUM_ROWS)]
    assert screen(**{name: numbers}).features.names == ("useful",)
    assert screen(paid=numbers).features.names == ("useful", "paid")
    assert screen(**{name: [number + 0.5 for number in numbers]}).features.names == ("useful", name)


def test_reasons_are_told_once_for_all_their_columns(screen) -> None:
    notes = screen(a=["x"] * NUM_ROWS, b=[""] * NUM_ROWS, c=[1] * NUM_ROWS).notes
    assert notes == ("Left out: a, c (the same value in every row).", "Left out: b (no value in any row).")


def test_ids_are_told_from_all_rows_and_constants_from_those_with_a_label(screen) -> None:
    labels = ["", *LABELS[1:]]
    table = screen(id=range(NUM_ROWS), other=[1] + [0] * (NUM_ROWS - 1), y=labels)
    assert table.features.names == ("useful",) and len(table.notes) == 3


def test_a_copy_of_the_label_is_pointed_out_loudly_and_kept(screen) -> None:
    copies = {"text": ["alive" if label == "yes" else "dead" for label in LABELS], "number": [len(x) for x in LABELS]}
    table = screen(**copies)
    assert table.features.names == ("useful", "text", "number")
    for name, note in zip(copies, table.notes, strict=True):
        assert note.startswith(f"WARNING: {name} alone tells y") and f"--drop {name!r}" in note
    assert screen(**copies, drop=list(copies)).notes == ()


def test_a_column_that_nearly_tells_the_label_is_no_copy(screen) -> None:
    copy = ["alive" if label == "yes" else "dead" for label in LABELS]
    assert screen(other=[*copy[:-1], "alive" if copy[-1] == "dead" else "dead"]).notes == ()
    assert screen(other=["alive too", *copy[1:]]).notes == ()
    assert len(screen(other=["", *copy[1:]]).notes) == 1


def test_texts_in_a_column_of_numbers_are_counted(screen) -> None:
    table = screen(other=["many", *range(5, NUM_ROWS + 4)])
    assert table.notes == (f"other: 1 of {NUM_ROWS} values count as missing, as they are no numbers, such as 'many'.",)
    assert table.features.column("other").is_missing.sum() == 1


def test_rows_without_a_label_are_left_out_and_counted(screen) -> None:
    table = screen(y=["?", "", *LABELS[2:]])
    assert table.features.num_rows == len(table.labels.values) == NUM_ROWS - 2
    assert table.features.column("useful").values.tolist() == USEFUL[2:]
    assert table.notes == (f"2 of {NUM_ROWS} rows have no y, and are left out.",)


def test_a_class_with_one_row_is_told(screen) -> None:
    notes = screen(y=["maybe", *LABELS[1:]]).notes
    assert notes == ("y: classes with one row alone are never held out: maybe.",)


def test_classes_are_in_order_of_numbers_or_texts(screen) -> None:
    numbers = [("10", "9", "-1.5", "1e1")[i % 4] for i in range(NUM_ROWS)]
    assert screen(y=numbers).labels.classes == ("-1.5", "9", "10", "1e1")
    assert screen(y=["x", *numbers[1:]]).labels.classes == ("-1.5", "10", "1e1", "9", "x")


def test_the_label_of_arrays(read_arrays) -> None:
    table = labelled_table(read_arrays(X=np.arange(40.0).reshape(20, 2) ** 2, y=np.arange(20) % 2 == 0), "y")
    assert table.labels.classes == ("False", "True") and table.labels.values[:3].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "Usefull"}, r"--label Usefull: no such column; perhaps 'useful' is meant$"),
        ({"label": "zzz"}, r"--label zzz: no such column; there are useful, y$"),
        ({"drop": ["usefool"]}, r"--drop usefool: no such column; perhaps 'useful' is meant$"),
        ({"drop": ["y"]}, r"--drop y: is the column of --label"),
        ({"drop": ["useful"], "a": [""] * NUM_ROWS}, r"no column is left to learn from \(a: no value in any row\)"),
        ({"drop": ["useful"]}, r"no column is left to learn from \(there is none\)"),
        ({"y": ["a"] * NUM_ROWS}, r"--label y: all rows are of one class, 'a'"),
        ({"y": ["NA"] * NUM_ROWS}, r"--label y: no row has a label"),
        (
            {"y": [i / 7 for i in range(NUM_ROWS)]},
            r"--label y: is a quantity, 40 different numbers from 0 to 5.57143 in 40 rows, and only classes",
        ),
        ({"y": [f"row {i}" for i in range(NUM_ROWS)]}, r"--label y: has 40 different values in 40 rows, too many for"),
    ],
)
def test_what_cannot_be_learned_from_is_named_in_one_sentence(screen, settings, message) -> None:
    with pytest.raises(BadInput, match=r"^--data-dir .*t.csv: " + message) as caught:
        screen(**settings)
    assert "\n" not in str(caught.value)


def test_a_note_on_many_columns_is_short(screen) -> None:
    others = {f"c{i}": [""] * NUM_ROWS for i in range(MOST_COLUMNS - 2)}
    assert screen(**others).notes[0].endswith("c8, c9 and 988 more (no value in any row).")
