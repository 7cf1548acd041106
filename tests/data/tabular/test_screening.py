import numpy as np
import pytest

from data.tabular.screening import LabelledTable, labelled_table
from trainer.common.errors import UserError

NUM_ROWS = 40
USEFUL = [i * 7 % 11 for i in range(NUM_ROWS)]
LABELS = ["yes" if i % 3 else "no" for i in range(NUM_ROWS)]


@pytest.fixture
def screen(read):
    """Returns a function that reads a table with the column `useful`, the label `y` and the given columns."""

    def run(drop=(), label="y", flag="--drop", **columns) -> LabelledTable:
        columns = {"useful": USEFUL, **columns, **({} if "y" in columns else {"y": LABELS})}
        lines = zip(*columns.values(), strict=True)
        content = ",".join(columns) + "\n" + "".join(",".join(map(str, line)) + "\n" for line in lines)
        return labelled_table(read(content), label, dict.fromkeys(drop, flag))

    return run


def noted(table: LabelledTable) -> dict[str, str]:
    return {report.name: f"{report.kind}: {report.note}" for report in table.reports if report.note}


def test_an_ordinary_table_is_shown_without_notes(screen) -> None:
    table = screen(town=["Rome", "Oslo"] * 20)
    assert table.features.names == ("useful", "town") and table.warnings == ()
    assert [report.cells for report in table.reports] == [
        ("y", "label", "", "2 classes: no (14), yes (26)", ""),
        ("useful", "number", "", "0 to 10", ""),
        ("town", "category", "", "2: Oslo, Rome", ""),
    ]
    assert table.labels.classes == ("no", "yes")
    assert table.labels.values.tolist() == [int(label == "yes") for label in LABELS]


def test_a_dropped_column_is_reported_with_its_flag(screen) -> None:
    assert noted(screen(other=range(NUM_ROWS), drop=["other"], flag="--id"))["other"] == "left out: --id"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([""] * NUM_ROWS, "no value in any row"),
        ([f"1e{200 + i}" for i in range(NUM_ROWS)], "no finite number up to 1e+100 in any row"),
        (["x"] * NUM_ROWS, "the same value in every row"),
        ([3.5] * NUM_ROWS, "the same value in every row"),
        ([f"0{1 + i % 9}/0{1 + i % 7}/2024" for i in range(NUM_ROWS)], "ambiguous order of day"),
        ([f"name {i}" for i in range(NUM_ROWS)], "identifies rows"),
        (["twice", *(f"name {i}" for i in range(1, NUM_ROWS - 1)), "twice"], "identifies rows"),
        ([100 + i * 3 % NUM_ROWS for i in range(NUM_ROWS)], "identifies rows"),
    ],
)
def test_columns_are_dropped_with_a_reason(screen, values, reason) -> None:
    table = screen(other=values)
    assert table.features.names == ("useful",)
    assert list(noted(table)) == ["other"] and noted(table)["other"].startswith(f"left out: {reason}")


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
def test_similar_columns_are_kept(screen, values) -> None:
    table = screen(other=values)
    assert table.features.names == ("useful", "other") and noted(table) == {}


@pytest.mark.parametrize("name", ["id", "customer_id", "PassengerId", "user ID", "UUID"])
def test_whole_numbers_with_gaps_are_an_id_if_named_so(screen, name) -> None:
    numbers = [i * i for i in range(NUM_ROWS)]
    assert screen(**{name: numbers}).features.names == ("useful",)
    assert screen(paid=numbers).features.names == ("useful", "paid")
    assert screen(**{name: [number + 0.5 for number in numbers]}).features.names == ("useful", name)


def test_id_columns_use_all_rows_and_constants_only_labelled_rows(screen) -> None:
    labels = ["", *LABELS[1:]]
    table = screen(id=range(NUM_ROWS), other=[1] + [0] * (NUM_ROWS - 1), y=labels)
    assert table.features.names == ("useful",) and list(noted(table)) == ["y", "id", "other"]


def test_a_copy_of_the_label_is_kept_with_a_warning(screen) -> None:
    copies = {"text": ["alive" if label == "yes" else "dead" for label in LABELS], "number": [len(x) for x in LABELS]}
    table = screen(**copies)
    assert table.features.names == ("useful", "text", "number")
    for name, note in zip(copies, table.warnings, strict=True):
        assert note.startswith(f"WARNING: the values of {name} match the classes of y") and note.endswith(
            f"--drop {name}."
        )
    assert screen(**copies, drop=list(copies)).warnings == ()


def test_a_column_that_nearly_determines_the_label_is_not_a_copy(screen) -> None:
    copy = ["alive" if label == "yes" else "dead" for label in LABELS]
    assert screen(other=[*copy[:-1], "alive" if copy[-1] == "dead" else "dead"]).warnings == ()
    assert screen(other=["alive too", *copy[1:]]).warnings == ()
    assert len(screen(other=["", *copy[1:]]).warnings) == 1


def test_strings_in_a_column_of_numbers_are_counted(screen) -> None:
    table = screen(other=["many", *range(5, NUM_ROWS + 4)])
    assert noted(table) == {"other": "number: 'many' counts as missing"} and table.reports[1].num_missing == 1
    table = screen(other=["many", "few", *range(5, NUM_ROWS + 3)])
    assert noted(table) == {"other": "number: 'few', 'many' count as missing, because they are not numbers"}
    assert table.features.column("other").is_missing.sum() == table.reports[1].num_missing == 2


def test_rows_without_a_label_are_dropped_and_counted(screen) -> None:
    table = screen(y=["?", "", *LABELS[2:]])
    assert table.features.num_rows == len(table.labels.values) == NUM_ROWS - 2
    assert table.features.column("useful").values.tolist() == USEFUL[2:]
    assert noted(table) == {"y": "label: rows without a label are left out"} and table.reports[0].num_missing == 2


def test_a_class_with_one_row_is_reported(screen) -> None:
    table = screen(y=["maybe", *LABELS[1:]])
    assert noted(table) == {"y": "label: classes with a single row, which is never held out: maybe"}


def test_classes_are_sorted_as_numbers_or_text(screen) -> None:
    numbers = [("10", "9", "-1.5", "1e1")[i % 4] for i in range(NUM_ROWS)]
    assert screen(y=numbers).labels.classes == ("-1.5", "9", "10", "1e1")
    assert screen(y=["x", *numbers[1:]]).labels.classes == ("-1.5", "10", "1e1", "9", "x")


def test_labels_given_as_arrays_are_classes(read_arrays) -> None:
    table = labelled_table(read_arrays(X=np.arange(40.0).reshape(20, 2) ** 2, y=np.arange(20) % 2 == 0), "y")
    assert table.labels.classes == ("False", "True") and table.labels.values[:3].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "Usefull"}, r"--label Usefull: no such column; did you mean 'useful'\?$"),
        ({"label": "zzz"}, r"--label zzz: no such column; the columns are useful, y$"),
        ({"drop": ["usefool"]}, r"--drop usefool: no such column; did you mean 'useful'\?$"),
        ({"drop": ["b"], '"b, c"': USEFUL}, r"--drop b: no such column; .* \(write a comma in a name as '\\,'\)$"),
        ({"drop": ["y"]}, r"--drop y: names the --label column"),
        ({"drop": ["y"], "flag": "--id"}, r"--id y: names the --label column"),
        ({"drop": ["useful"], "a": [""] * NUM_ROWS}, r"has no column to learn from \(a: no value in any row\)"),
        ({"drop": ["useful"]}, r"has no column to learn from \(only the label\)"),
        ({"y": ["a"] * NUM_ROWS}, r"--label y: has only one class, 'a'"),
        ({"y": ["NA"] * NUM_ROWS}, r"--label y: no row has a label"),
        (
            {"y": [i / 7 for i in range(NUM_ROWS)]},
            r"--label y: has 40 different numbers from 0 to 5.57143 in 40 rows, but only classes",
        ),
        ({"y": [f"row {i}" for i in range(NUM_ROWS)]}, r"--label y: has 40 different values in 40 rows, too many for"),
    ],
)
def test_unusable_tables_are_refused_in_one_sentence(screen, settings, message) -> None:
    with pytest.raises(UserError, match=r"^--data-dir .*t.csv: " + message) as caught:
        screen(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "kind", "note"),
    [
        ([f"${i * 37.5 + 1000}" for i in range(NUM_ROWS)], "number", "'$1000.0' is read as 1000"),
        (["-" if i % 3 else i / 2 for i in range(NUM_ROWS)], "number", "'-' counts as missing"),
        (["01067", "10115"] * (NUM_ROWS // 2), "number", "'01067' is read as 1067"),
        (["other" if i % 3 == 0 else i % 4 for i in range(NUM_ROWS)], "category", "text among the numbers: 'other'"),
        ([f"{i} kg" if i % 2 else f"{i} lb" for i in range(NUM_ROWS)], "left out", "numbers in different formats: '"),
        (["good", "Good", "bad", "BAD"] * 10, "category", "'BAD' and 'bad' are different categories"),
        (["a", "A", "b", "B"] * 10, "category", None),
    ],
)
def test_how_a_column_was_read_is_noted(screen, values, kind, note) -> None:
    (report,) = [report for report in screen(other=values).reports if report.name == "other"]
    assert report.kind == kind and report.note.startswith(note or "") and bool(report.note) == bool(note)


def test_suspicious_classes_are_reported(screen) -> None:
    assert noted(screen(y=["yes", "Yes", "NO", "no"] * 10)) == {}
    assert noted(screen(y=["good", "Good"] * 20)) == {"y": "label: 'Good' and 'good' are different categories"}
    rings = screen(useful=[i % 11 for i in range(210)], y=[i % 21 for i in range(210)])
    assert noted(rings) == {"y": "label: possibly a quantity, but each number counts as a class"}
