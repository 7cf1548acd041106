"""Tests human activity recognition on a user's own recordings, from a CSV file to labels of a new recording."""

import csv
import json

import numpy as np
import pytest

from tests.conftest import load
from trainer import load as load_run
from trainer.common.errors import UserError

NAMES = ["when", "heart", "acc_x", "acc_y", "acc_z", "person", "label"]
RATE, WINDOW = 20, 40
MODELS = [["--model", "harnet"], ["--model", "tinyhar"], ["--model", "deepconvlstm"], ["--mode", "flatten"]]
SHORT = ["--epochs", 2, "--batch-size", 16, "--num-threads", 1, "--device", "cpu", "--lr", 0.01]


def rows(person, activity, num, seed):
    """Returns rows [index, heart rate, three signals, person, activity]; running shakes, resting does not."""
    rng = np.random.default_rng(seed)
    strength = {"run": 1.0, "rest": 0.05}[activity]
    shaking = strength * np.sin(np.arange(num)[:, None] * 2.0 + rng.uniform(0, 6, 3)) + 0.02 * rng.normal(size=(num, 3))
    return [[i, f"{60 + 40 * strength:.1f}", *(f"{v:.4f}" for v in values), person, activity]
            for i, values in enumerate(shaking)]  # fmt: skip


@pytest.fixture
def recordings(tmp_path):
    path = tmp_path / "mine.csv"
    people = ["ann", "bob", "cat", "dan", "eve", "fay"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(NAMES)
        for i, person in enumerate(people):
            for j, activity in enumerate(("run", "rest", "run")):
                writer.writerows(rows(person, activity, 130, 10 * i + j))
    return path


@pytest.fixture
def own(recordings):
    return [
        "--data-dir",
        recordings,
        "--channels",
        "heart,acc_x,acc_y,acc_z",
        "--rate",
        RATE,
        "--window",
        WINDOW,
        *SHORT,
    ]


def test_classes_without_training_windows_are_reported(own, recordings, run_here, tmp_path):
    lines = recordings.read_text().splitlines()
    recordings.write_text("\n".join(line for line in lines if ",run" not in line or ",eve," in line or ",fay," in line))
    out, _ = run_here(*own, "--test-subjects", "eve", "fay", "--save-dir", tmp_path / "run")
    assert "The training set has no windows of run; hold out other subjects with --test-subjects or --val-subj" in out


@pytest.mark.parametrize("more", [["--epochs", 3], ["--eval-only"]], ids=lambda more: more[0])
def test_changed_held_out_people_are_reported(more, own, run_here, tmp_path):
    argv = [*own, "--save-dir", tmp_path / "run"]
    run_here(*argv)
    out, _ = run_here(*argv, *more)
    assert "held out are not those" not in out
    out, _ = run_here(*argv, *more, "--epochs", 4, "--test-subjects", "bob")
    assert "The split into training and held-out data differs from the checkpoint" in out


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[-1])
def test_a_trained_run_labels_a_new_recording(model, own, recordings, run_here, tmp_path):
    run = tmp_path / "run"
    out, _ = run_here(*own, *model, "--save-dir", run)
    for row in ("person subject 6 people", "heart channel 62 to 100", "when left out not among --channels"):
        assert row in {" ".join(line.split()) for line in out.splitlines()}, out
    assert "Classes (2, with numbers of windows): rest: 30, run: 60." in out and "Test subjects: eve." in out
    results = json.loads((run / "results.json").read_text())
    assert results["classes"] == ["rest", "run"] and results["metrics"]["test/accuracy"] > 0.9
    assert load(run / "best.pth")["data_facts"]["channels"] == ["acc_x", "acc_y", "acc_z", "heart"]
    assert load_run(run).mean.shape == (4, 1)
    recordings.unlink()
    new = tmp_path / "new.csv"
    lines = [row[:6] for row in rows("gus", "rest", 70, 99) + rows("gus", "run", 70, 98)]
    new.write_text("\n".join([",".join(NAMES[:6]), *(",".join(map(str, line)) for line in lines)]))
    out, err = run_here("--predict", new, "--save-dir", run, "--num-threads", 1)
    table = list(csv.DictReader(out.splitlines()))
    assert err.startswith(f"From the run in {run}: --data-dir {recordings}, ") and err.count("\n") == 1
    assert [row["start_s"] for row in table] == [f"{i:.2f}" for i in range(6)]
    assert (table[0]["person"], table[0]["end_s"]) == ("gus", "2.00")
    assert (table[0]["activity"], table[-1]["activity"]) == ("rest", "run")
    assert float(table[0]["rest"]) + float(table[0]["run"]) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize(
    ("step", "says"), [("0.01", "100"), ("10", "100"), ("10000000", "100"), ("0.04", ""), ("1", "")]
)
def test_a_clock_that_contradicts_the_rate_is_reported(step, says, recordings, make_task):
    """The clock is in seconds, milliseconds or nanoseconds, or counts rows; --rate says 25."""
    header, *lines = (line.split(",") for line in recordings.read_text().splitlines())
    clocked = [
        ",".join(["time", *header[1:]]),
        *(",".join([f"{i * float(step):.9g}", *line[1:]]) for i, line in enumerate(lines)),
    ]
    recordings.write_text("\n".join(clocked))
    task = make_task("--data-dir", recordings, "--rate", 25, "--window", WINDOW, "--label-column", "label")
    found = [remark for remark in task.remarks() if "but --rate" in remark]
    assert len(found) == bool(says)
    assert not found or f"the clock shows {says} rows per second, but --rate 25" in found[0]


def test_without_a_rate_the_clock_is_used(recordings, run_here, tmp_path):
    """The resumed run and predictions for a file without a clock use the rate of the run's clock."""
    header, *lines = (line.split(",") for line in recordings.read_text().splitlines())
    clocked = [",".join([f"{i / 99.98:.5f}", *line[2:]]) for i, line in enumerate(lines)]
    recordings.write_text("\n".join([",".join(["time", *header[2:]]), *clocked]))
    argv = ["--window", WINDOW, *SHORT, "--save-dir", tmp_path / "run"]
    out, _ = run_here("--data-dir", recordings, *argv)
    assert "99.98 rows per second" in out and "Warning" not in out
    run_here("--data-dir", recordings, *argv, "--epochs", 3)
    new = tmp_path / "new.csv"
    new.write_text("\n".join([",".join(header[2:5]), *(",".join(line[2:5]) for line in lines[:100])]))
    out, err = run_here("--predict", new, "--save-dir", tmp_path / "run", "--num-threads", 1)
    assert err.startswith("From the run in ") and err.count("\n") == 1
    assert [row["end_s"] for row in csv.DictReader(out.splitlines())] == ["0.40", "0.60", "0.80", "1.00"]
    new.write_text("\n".join([",".join(header[2:5]), *(",".join(f"{60 * float(v):.2f}" for v in line[2:5])
                                                       for line in lines[:100])]))  # fmt: skip
    _, err = run_here("--predict", new, "--save-dir", tmp_path / "run", "--num-threads", 1)
    _, warning = err.splitlines()
    assert warning.startswith(f"Warning: --predict {new}: values of acc_x, acc_y, acc_z ")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["Protocol/subject101.dat"], "is PAMAP2 (Protocol/subject101.dat), which cannot be read directly"),
        (["mHealth_subject1.log"], "is MHEALTH"),
        (["dataset/S1-ADL1.dat", "doc/notes.txt"], "is OPPORTUNITY"),
        (["walk/ann.csv", "rest/ann.csv"], "has tables in subfolders (rest/ann.csv, walk/ann.csv); put all"),
        (["notes.txt"], "is neither UCI HAR (a folder or a zip) nor a table of recordings; give a table"),
        ([], "files found: no files"),
    ],
)
def test_other_data_are_recognised_and_refused(files, says, make_task, tmp_path):
    """The refusal does not depend on a flag for own recordings."""
    (tmp_path / "data").mkdir()
    for name in files:
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text("1 2 3\n")
    for more in ((), ("--rate", 100)):
        with pytest.raises(UserError) as refused:
            make_task("--data-dir", tmp_path / "data", *more).splits()
        assert str(refused.value).startswith(f"--data-dir {tmp_path / 'data'}: ") and says in str(refused.value)


def test_folds_divide_people(own, run_here, tmp_path):
    run_here(*own, "--epochs", 1, "--folds", 2, "--save-dir", tmp_path / "folds")
    held_out = [
        json.loads((tmp_path / "folds" / f"fold-{k}" / "config.json").read_text())["config"]["--val-subjects"]
        for k in (1, 2)
    ]
    assert held_out == [["ann", "cat", "fay"], ["bob", "dan"]]


def test_invalid_arguments_are_refused(own, run_here, recordings, tmp_path):
    save = ["--save-dir", tmp_path / "run"]
    for argv, part in (
        (["--window", 40, *SHORT], "--window 40: only for your own recordings; give recordings with --data-dir"),
        (
            [*own, "--val-subjects", "zoe"],
            "--val-subjects zoe: no such training subjects; the training subjects are ann bob cat dan fay",
        ),
        ([*own, "--subject-column", "who"], "has no column for --subject-column who; the columns are when, h"),
        ([*own[:2], "--channels", "heart,acc_x,heart", *own[4:]], "--channels: contains heart more than once"),
        ([*own, "--model", "deepconvlstm", "--window", 9], "--window 9: must be at least 17 for --model deepconvlstm"),
        (
            ["--data-dir", tmp_path / "notes.pdf", "--rate", 50],
            "notes.pdf: is neither UCI HAR (a folder or a zip) nor a table",
        ),
    ):
        (tmp_path / "notes.pdf").write_text("x")
        _, err = run_here(*argv, *save, status=2)
        assert part in err and err.count("error: ") == 1, err
        assert not (tmp_path / "run").exists()


def test_weights_are_refused_for_recordings_with_other_classes(own, recordings, run_here, tmp_path):
    run_here(*own, "--epochs", 1, "--save-dir", tmp_path / "run")
    recordings.write_text(recordings.read_text().replace(",rest\n", ",sleep\n"))
    _, err = run_here(*own, "--save-dir", tmp_path / "run", status=2)
    assert "the training data and the checkpoint differ in classes: run sleep instead of rest run" in err
