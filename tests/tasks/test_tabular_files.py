import csv
import io

import pytest

TABULAR = ["--task", "tabular", "--label", "y", "--num-estimators", "1"]


def write(path, rows, names="id,x,y"):
    path.write_text(names + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def rows_of(start, num):
    return [(f"r{k}", k % 7 - 3, "high" if k % 7 > 3 else "low") for k in range(start, start + num)]


@pytest.fixture
def train(tmp_path):
    return write(tmp_path / "train.csv", rows_of(0, 60))


def test_rows_of_a_file_are_the_test_set(run_here, train, tmp_path):
    test = write(tmp_path / "test.csv", [*rows_of(100, 20), ("r", 0, ""), ("s", 0, "odd")])
    shown, _ = run_here(*TABULAR, "--data-dir", train, "--test-data", test, "--id", "id")
    assert "Data: 60 train, 20 test samples" in shown and "test/accuracy 1.0000" in shown
    assert f"--test-data {test}: 2 of 22 rows are left out, because" in shown and "(such as 'odd')" in shown


def test_test_data_with_other_classes_or_columns_are_refused(refused, train, tmp_path):
    argv = [*TABULAR, "--data-dir", train, "--test-data"]
    other = write(tmp_path / "other.csv", [("a", 1, "low."), ("b", 2, "high.")])
    refused(
        [f"--test-data {other}: 2 of 2 rows are left out, because they have no class, or a class (such as"],
        *argv,
        other,
    )
    unlabelled = write(tmp_path / "unlabelled.csv", [("a", 1)], "id,x")
    refused([f"--test-data {unlabelled}: --label y: no such column"], *argv, unlabelled)
    refused(["--test-share 0.5 and --test-data: cannot be combined"], *argv, train, "--test-share", "0.5")


def test_a_folder_names_training_validation_and_test_files(run_here, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for part, rows in {"train": rows_of(0, 60), "valid": rows_of(100, 21), "test": rows_of(200, 14)}.items():
        write(folder / f"{part}.csv", rows)
    argv = [*TABULAR, "--data-dir", folder, "--id", "id"]
    assert "Data: 60 train, 14 test samples" in run_here(*argv).out
    tuned = run_here(*argv, "--tune", "lora", "--epochs", 1, "--num-episodes", 16, "--save-dir", tmp_path / "run").out
    assert "Data: 16 train, 21 val, 14 test samples" in tuned
    write(folder / "test.csv", [(f"r{k}", k - 3) for k in range(7)], "id,x")  # Kaggle's test files have no labels
    out = run_here(*argv).out
    assert f"--data-dir {folder}/test.csv: has no column 'y', so it is not scored; --predict can" in out
    assert "Data: 48 train, 12 test samples" in out
    rows = list(csv.DictReader(io.StringIO(run_here(*argv, "--predict", folder).out)))
    assert [row["y"] for row in rows] == ["low"] * 4 + ["low" if k <= 3 else "high" for k in range(4, 7)]


def test_an_id_column_is_kept_in_predictions_but_is_not_a_feature(run_here, train, tmp_path):
    new = write(tmp_path / "new.csv", [("b", 3, 1), ("", -3, 1), ("a", 2, 1)], "id,x,z")
    shown, notes = run_here(*TABULAR, "--data-dir", train, "--id", "id", "--predict", new)
    found = list(csv.reader(io.StringIO(shown)))
    assert found[0] == ["id", "y", "p(high)", "p(low)"]
    assert [row[:2] for row in found[1:]] == [["b", "high"], ["", "low"], ["a", "high"]]
    assert "did not use: z." in notes
    new = write(tmp_path / "keyed.csv", [("b", 3, 0)], "key,x,id")  # an id that only the new rows have
    shown, notes = run_here(*TABULAR, "--data-dir", train, "--id", "key", "--predict", new)
    assert shown.startswith("key,y") and "no such column" not in notes
    warning = f"Warning: --data-dir {train}: --id key: no such column."
    assert warning in run_here(*TABULAR, "--data-dir", train, "--id", "key").out


def test_a_table_without_names_is_pointed_to_the_page(refused, tmp_path):
    path = tmp_path / "adult.data"
    path.write_text("39, State-gov, <=50K\n50, Self-emp, >50K\n")
    message = (
        "--label income: no such column; the columns are 39, <=50K, State-gov; if these are values, docs/formats.md#no"
    )
    refused([message], "--task", "tabular", "--data-dir", path, "--label", "income")
