"""Tests tabular runs on the command line: on any number of devices, after a kill anywhere, and on a user's table."""

import csv
import json
import re

import numpy as np
import pytest
import torch

from tests.conftest import assert_same_bits, cut_back, launcher, load, read_metrics, results_of
from tests.helpers.replicas import ReplicasOnCpu, trained
from tests.helpers.small_table import SMALL_MODEL, SMALL_PRIOR, write_table
from trainer.common.errors import UserError
from trainer.loading.batches import of_dtype
from trainer.loading.order import SampleKeys
from trainer.parallel.strategy import SingleDevice

TASK = ["--task", "tabular", "--num-threads", 1]
PRIOR = [*TASK, "--dtype", "float64", "--epochs", 2, *SMALL_PRIOR, *SMALL_MODEL, "--global-batch-size", 16]


def assert_close(one, other):
    ours, theirs = (load(run / "final.pth")["model"] for run in (other, one))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert results_of(other)["metrics"] == pytest.approx(results_of(one)["metrics"], rel=1e-9)


# --- any number of devices ---------------------------------------------------------------------------------------


def test_any_micro_batches_give_the_same_weights(run_here, tmp_path):
    run_here(*PRIOR, "--batch-size", 16, "--save-dir", tmp_path / "whole")
    run_here(*PRIOR, "--batch-size", 3, "--eval-batch-size", 5, "--save-dir", tmp_path / "parts")
    assert_close(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_any_number_of_processes_gives_the_same_weights(nproc, run_here, command, tmp_path):
    run_here(*PRIOR, "--batch-size", 16, "--save-dir", tmp_path / "one")
    command(*launcher(nproc), *PRIOR, "--device", "cpu", "--batch-size", 2, "--save-dir", tmp_path / "several")
    assert results_of(tmp_path / "several")["world_size"] == nproc
    assert_close(tmp_path / "one", tmp_path / "several")


def test_replicas_equal_one_device(cache_dir, tmp_path):
    argv = [*map(str, PRIOR), "--cache-dir", str(cache_dir / "lockstep")]
    one, test_one = trained(SingleDevice(torch.device("cpu")), tmp_path / "one", *argv)
    many, test_many = trained(ReplicasOnCpu(2), tmp_path / "many", *argv, "--batch-size", "3")
    torch.testing.assert_close(many["model"], one["model"], rtol=1e-9, atol=1e-11)
    assert test_many == pytest.approx(test_one, rel=1e-9)


def test_resumes_bit_identically(run_here, tmp_path):
    argv = [*PRIOR, "--batch-size", 16, "--save-every-steps", 1, "--keep-checkpoints", 0]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    entries = json.loads((tmp_path / "whole" / "manifest.json").read_text())["checkpoints"]
    middle = next(i for i, entry in enumerate(entries) if entry["epoch"] == 1 and entry["samples"] > 0)
    cut_back(tmp_path / "whole", entries[: middle + 1], tmp_path / "again")
    run_here(*argv, "--save-dir", tmp_path / "again")
    assert_same_bits(load(tmp_path / "whole" / "final.pth"), load(tmp_path / "again" / "final.pth"))
    assert read_metrics(tmp_path / "again", "result") == read_metrics(tmp_path / "whole", "result")


def test_the_model_separates_as_many_classes_as_the_context_has(make_task):
    """Otherwise answers for tables with more classes would rest on untrained weights."""
    task = make_task("--task", "tabular", *SMALL_PRIOR, *SMALL_MODEL)
    assert task.build_objective().model.max_classes == 3
    for dataset in task.splits().values():
        assert dataset.__getitems__(SampleKeys(np.arange(6), epoch=0))["labels"].max() < 3


def test_every_rank_calls_a_collective_model_equally_often(make_task):
    task = make_task("--task", "tabular", *SMALL_PRIOR, *SMALL_MODEL)
    objective = task.build_objective().double().eval()
    keys = SampleKeys(np.zeros(33, dtype=np.int64), epoch=0)
    dataset = task.splits()["val/prior"]
    batch = of_dtype(task.collate(dataset.__getitems__(keys), keys), torch.float64)
    calls = []
    objective.model.register_forward_hook(lambda *_: calls.append(1))
    cut = objective(batch)
    assert len(calls) == 2
    objective.call_equally()
    torch.testing.assert_close(objective(batch), cut, rtol=1e-12, atol=0)
    assert len(calls) == 3


def test_every_epoch_has_different_tables(make_task):
    train = make_task("--task", "tabular", *SMALL_PRIOR).splits()["train"]
    first, second = (train.__getitems__(SampleKeys(np.arange(4), epoch))["labels"] for epoch in (0, 1))
    assert first.shape != second.shape or not np.array_equal(first, second)


def test_the_largest_synthetic_tables_are_tried(make_task):
    task = make_task("--task", "tabular", *SMALL_PRIOR)
    train = task.splits()["train"]
    largest = task.largest_samples("train", 3, 2)
    assert largest.tolist() == train.largest(3, 2).tolist() != [0, 1]


# --- a user's table ----------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "train.csv")


@pytest.fixture
def new_rows(tmp_path):
    return write_table(tmp_path / "new.csv", 200, seed=1, label=None)


def test_a_table_is_scored_without_training(table, run_here, tmp_path):
    out, _ = run_here(*TASK, "--data-dir", table, "--label", "kind", "--save-dir", tmp_path / "run")
    assert "Evaluating the weights that come with tabular." in out
    assert "test/auc" in out and "test/ece" in out and "test/brier" in out
    regression = re.search(r"logistic regression +\S+ +(\S+) ", out)
    assert regression is not None and 0.5 < float(regression[1]) <= 1
    assert (
        "logistic"
        not in run_here(*TASK, "--data-dir", table, "--label", "kind", "--no-baselines", "--save-dir", tmp_path).out
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["scores.jsonl"]


def test_new_rows_are_classified_without_training(table, new_rows, run_here, tmp_path):
    argv = [*TASK, "--data-dir", table, "--label", "kind", "--predict", new_rows, "--save-dir", tmp_path / "none"]
    rows = list(csv.DictReader(run_here(*argv)[0].splitlines()))
    assert list(rows[0]) == ["kind", "p(big)", "p(small)"] and len(rows) == 200
    told = list(csv.DictReader(new_rows.read_text().splitlines()))
    right = [
        row["kind"] == ("big" if float(new["size"]) > 0.3 and new["colour"] != "green" else "small")
        for row, new in zip(rows, told, strict=True)
    ]
    assert sum(right) >= 190  # 158 rows are small
    for row in rows:
        p = {name: float(row[f"p({name})"]) for name in ("big", "small")}
        assert sum(p.values()) == pytest.approx(1, abs=2e-4) and max(p, key=p.get) == row["kind"]
    parts = list(csv.DictReader(run_here(*argv, "--eval-batch-size", 64)[0].splitlines()))
    assert [row["kind"] for row in parts] == [row["kind"] for row in rows]
    assert [float(row["p(big)"]) for row in parts] == pytest.approx([float(row["p(big)"]) for row in rows], abs=2e-4)


@pytest.mark.parametrize("tune", ["base", "lora"])
def test_tuning_changes_only_its_weights_and_keeps_the_better_ones(tune, table, new_rows, run_here, tmp_path):
    argv = [*TASK, "--data-dir", table, "--label", "kind", "--tune", tune, "--num-episodes", 4, "--num-estimators", 2]
    argv += ["--batch-size", 2, "--epochs", 2]
    out, _ = run_here(*argv, "--save-dir", tmp_path / "run")
    assert "Starting with the weights that come with this task" in out
    assert (re.search(r"; newly initialised: .*lora_", out) is not None) == (tune == "lora")
    start, end = (load(tmp_path / "run" / name)["model"] for name in sorted_checkpoints(tmp_path / "run"))
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    adapters = {name for name in start if "lora_" in name}
    assert len(changed) > 0.9 * len(adapters if tune == "lora" else start)
    assert changed <= adapters if tune == "lora" else not adapters
    losses = [record["val/loss"] for record in read_metrics(tmp_path / "run", "epoch")]
    assert results_of(tmp_path / "run")["best"]["value"] == min(losses) and len(losses) == 3
    rows = run_here(*TASK, "--predict", new_rows, "--save-dir", tmp_path / "run")[0].splitlines()
    assert len(rows) == 201


def sorted_checkpoints(directory):
    """Returns the first and the last checkpoint."""
    entries = json.loads((directory / "manifest.json").read_text())["checkpoints"]
    return [entries[0]["file"], entries[-1]["file"]]


def test_weights_made_worse_by_tuning_are_not_used(table, run_here, tmp_path):
    argv = [*TASK, "--data-dir", table, "--label", "kind", "--tune", "base", "--num-episodes", 4, "--epochs", 1]
    run_here(*argv, "--lr", 30, "--num-estimators", 2, "--save-dir", tmp_path / "run")
    assert results_of(tmp_path / "run")["best"]["step"] == 0


def test_a_run_first_prints_how_it_read_the_table(new_rows, run_here, tmp_path):
    path = write_table(tmp_path / "train.csv")
    lines = path.read_text().splitlines()
    named = [f"{line},{'id' if i == 0 else f'row {i}'}" for i, line in enumerate(lines)]
    path.write_text("\n".join(named).replace(",,", ",-,"))
    argv = [*TASK, "--data-dir", path, "--label", "kind", "--max-context", 16, "--num-estimators", 1]
    argv += ["--save-dir", tmp_path / "none"]
    out = run_here(*argv)[0].splitlines()
    start = out.index(f"Columns of {path}:")
    rows = [re.split("  +", line.strip()) for line in out[start + 1 : start + 7]]
    assert rows[0] == ["column", "kind", "missing", "values", "note"]
    assert rows[1][:2] == ["kind", "label"] and rows[1][2].startswith("2 classes: big (")
    assert rows[2][:2] == ["id", "left out"] and rows[2][-1].startswith("identifies rows")
    assert rows[3][:2] == ["weight", "number"] and int(rows[3][2]) > 0 and rows[3][-1] == "'-' counts as missing"
    assert rows[4][:2] == ["size", "number"] and rows[5] == ["colour", "category", "3: blue, green, red"]
    assert "Each prediction learns from 16 of 72 rows with known classes (--max-context)." in out
    table, err = run_here(*argv, "--predict", new_rows)
    assert table.startswith("kind,p(big),p(small)") and table.count("\n") == 201
    assert err.splitlines()[1:7] == out[start : start + 6]  # below a line about the weights


def test_a_tuned_model_refuses_another_context_table(table, new_rows, run_here, refused, tmp_path):
    argv = [*TASK, "--label", "kind", "--tune", "base", "--num-episodes", 2, "--epochs", 1, "--num-estimators", 1]
    run_here(*argv, "--data-dir", table, "--save-dir", tmp_path / "run")
    other = tmp_path / "other.csv"
    other.write_text(table.read_text().replace("big", "huge"))
    refused(
        ["differs in columns or classes from the table on which the run was tuned"],
        *("--task", "tabular", "--data-dir", other, "--label", "kind", "--predict", new_rows),
        *("--save-dir", tmp_path / "run"),
    )


def test_a_run_with_classes_named_by_floats_predicts(table, new_rows, make_task):
    labelled = table.with_name("numbers.csv")
    labelled.write_text(table.read_text().replace("big", "1.0").replace("small", "0.0"))
    task = make_task("--task", "tabular", "--data-dir", str(labelled), "--label", "kind")
    task.data_facts = {"classes": ["0.0", "1.0"], "columns": ["size", "colour", "weight"]}
    assert len(task.new_data(new_rows)) == 200
    task.data_facts = {"classes": ["0.5", "1.0"], "columns": ["size", "colour", "weight"]}
    with pytest.raises(UserError, match="differs in columns or classes"):
        task.new_data(new_rows)


def test_tuning_does_not_resume_with_other_data(table, run_here, refused, tmp_path):
    """Neither a pre-trained run, whose best score is another measure, nor a run on another table resumes."""
    run_here(*TASK, *SMALL_PRIOR, "--epochs", 1, "--save-dir", tmp_path / "learned")
    argv = [*TASK, "--label", "kind", "--tune", "base", "--num-episodes", 2, "--epochs", 2, "--num-estimators", 1]
    learned = tmp_path / "learned"
    _, err = run_here(*argv, "--data-dir", table, "--save-dir", learned, status=2)
    assert "the training data and the checkpoint differ in classes: big small instead of (none)" in err
    run_here(*argv, "--data-dir", table, "--save-dir", tmp_path / "tuned")
    other = write_table(tmp_path / "other.csv", seed=5)
    refused(["checkpoint differ in rows: "], *argv, "--data-dir", other, "--save-dir", tmp_path / "tuned")


def test_a_table_with_one_column_is_exported_with_padding(make_task, tmp_path):
    (tmp_path / "one.csv").write_text("x,y\n" + "".join(f"{i / 7:.3f},{i % 3 // 2}\n" for i in range(30)))
    task = make_task(*TASK[:2], "--data-dir", tmp_path / "one.csv", "--label", "y", *SMALL_MODEL)
    objective, keys = task.build_objective().eval(), SampleKeys(np.arange(3), epoch=0)
    batch = task.collate(task.splits()["test"].__getitems__(keys), keys)
    found = task.exported(objective, batch)
    assert found.inputs["context"].shape == (3, 24, 2) and found.inputs["queries"].shape == (3, 2, 2)
    unpadded = [found.inputs[name][..., :1] for name in ("context", "queries")]
    torch.testing.assert_close(found.expected, objective.model(unpadded[0], found.inputs["labels"], unpadded[1]))


def test_a_custom_model_is_scored_on_a_table(table, run_here, tmp_path):
    run_here(*TASK, *SMALL_PRIOR, *SMALL_MODEL, "--epochs", 1, "--save-dir", tmp_path / "learned")
    argv = [*TASK, *SMALL_MODEL, "--max-classes", 3, "--data-dir", table, "--label", "kind", "--num-estimators", 1]
    out, _ = run_here(*argv, "--init-from", tmp_path / "learned" / "best.pth", "--save-dir", tmp_path / "none")
    assert f"Evaluating the weights in {tmp_path / 'learned' / 'best.pth'}." in out
    out, _ = run_here("--eval-only", *argv[-6:], "--save-dir", tmp_path / "learned")
    assert "test/accuracy" in out


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("--min-rows 90 --max-rows 80", "--min-rows 90 and --max-rows 80: the first must not exceed the second"),
        ("--label kind", "--label kind: does nothing without --data-dir"),
        ("--tune base", "--tune base: does nothing without --data-dir"),
        ("--num-estimators 4", "--num-estimators 4: does nothing without --data-dir"),
        ("--data-dir TABLE", "--label: give the name of the column to predict"),
        (
            "--data-dir TABLE --label kind --num-tables 9",
            "--num-tables 9: applies only to synthetic tables; leave it out, or leave out --data-dir",
        ),
        (
            "--data-dir TABLE --label kind --lora-rank 4",
            "--lora-rank 4: --tune none does not use it; leave it out, or choose lora",
        ),
        ("--data-dir TABLE --label kind --num-episodes 4", "--num-episodes 4: does nothing without --tune"),
        ("--data-dir TABLE --label knd", "--label knd: no such column; did you mean 'kind'?"),
        ("--data-dir TABLE --label kind --prior-only x.npz", "--prior-only x.npz: applies only to synthetic tables;"),
        ("--data-dir TABLE --label kind --seeds 2", "--seeds 2: trains models, but the other flags train nothing"),
        ("--data-dir TABLE --label kind --test-share 0", "--test-share 0: leaves no rows to score"),
        ("--model tabicl --width 9", "--width 9: --model tabicl does not use it; leave it out"),
        ("--width 9", "--width 9: must be a multiple of --num-heads 4"),
    ],
)
def test_one_error_is_named(args, part, refused, table, tmp_path):
    argv = [str(table) if arg == "TABLE" else arg for arg in args.split()]
    refused([part], "--task", "tabular", *argv, "--save-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("--tune base --width 32", "the weights that come with this task do not fit the model: "),
        ("--tune lora --lora-targets no", "--lora-targets no: matches no linear layer"),
    ],
)
def test_models_without_layers_to_tune_are_refused(args, part, refused, table, tmp_path):
    argv = ["--data-dir", table, "--label", "kind", *args.split(), "--save-dir", tmp_path / "run"]
    refused([part], "--task", "tabular", *argv)


def test_a_sharded_model_cannot_score_a_table(table, make_task):
    task = make_task("--task", "tabular", "--data-dir", str(table), "--label", "kind", "--tune", "lora")
    with pytest.raises(UserError, match="with --data-dir the number of calls can differ"):
        task.build_objective().call_equally()


def test_new_rows_with_a_label_are_refused(table, refused, tmp_path):
    argv = ["--data-dir", table, "--label", "kind", "--predict", table, "--save-dir", tmp_path / "none"]
    refused(["has the column 'kind', which is the label to predict; remove the column"], "--task", "tabular", *argv)


def test_synthetic_tables_can_be_written(run_here, tmp_path):
    out, _ = run_here(*TASK, *SMALL_PRIOR, "--prior-only", tmp_path / "tables.npz", "--save-dir", tmp_path / "run")
    assert f"{tmp_path / 'tables.npz'}" in out
    with np.load(tmp_path / "tables.npz") as tables:
        assert len(tables["labels"]) == 40
    assert not (tmp_path / "run").exists()
