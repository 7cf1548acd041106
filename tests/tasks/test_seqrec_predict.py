"""Tests recommendations of a finished sequential run, from a user's file to original ids."""

import csv
import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers.small_seqrec import ITEMS, NUM_ITEMS, TIMES
from trainer import load as load_run

SMALL = "--hidden-units 8 --num-heads 2 --maxlen 6 --time-span 9 --k-core 0".split()


def name(item):
    return f"item-{item:03}"


@pytest.fixture(params=[[], ["--no-time"]], ids=["TiSASRec", "SASRec"])
def trained(request, tmp_path, run_here):
    """Trains on a file with custom names of columns, users and items; returns the run and whether it uses times."""
    data, run = tmp_path / "log.csv", tmp_path / "run"
    lines = [f'{t},"u{u}",{name(i)}' for u, row in enumerate(ITEMS) for i, t in zip(row, TIMES[u], strict=True)]
    data.write_text("\n".join(["seconds,buyer,item", *lines]))
    out, _ = run_here(
        *("--task", "seqrec", "--data-dir", data, "--user-column", "buyer", "--time-column", "seconds", *SMALL),
        *("--epochs", 1, "--batch-size", 16, "--num-threads", 1, "--save-dir", run, *request.param),
    )
    assert re.search(r"\n +buyer +user .*\n +item +item .*\n +seconds +time ", out)
    data.unlink()
    return run, not request.param


@pytest.fixture
def predict(trained, run_here, tmp_path):
    def run(text, *more, status=0):
        path = tmp_path / "histories.csv"
        path.write_text(text)
        argv = ["--task", "seqrec", "--predict", path, "--save-dir", trained[0], "--num-threads", 1]
        out, err = run_here(*argv, *more, status=status)
        return list(csv.DictReader(out.splitlines())), err

    return run


HISTORY = f"buyer,item,seconds\nnew,{name(1)},1\n"


def slow_scores(run, items, times):
    """Returns one user's scores of all items from the plain model of the run."""
    gaps = [b - a for a, b in pairwise(times) if b > a]
    scaled = [round((t - times[0]) / min(gaps, default=1)) + 1 for t in times]
    model, shown = load_run(run), items[-6:]
    with torch.no_grad():
        scores = model(torch.tensor([shown]), torch.tensor([len(shown)]), torch.tensor([scaled[-6:]]))[0]
    scores[items] = -torch.inf
    return scores


def test_recommends_the_highest_ranked_new_items(trained, predict):
    run, _ = trained
    histories = {"zoe": ([5, 3, 9], [10, 10, 30]), "adam": (list(range(20, 29)), [*range(1, 18, 2)])}
    lines = [
        f"{t};{user};{name(i)}"
        for user, (items, times) in histories.items()
        for i, t in reversed(list(zip(items, times, strict=True)))
    ]
    lines[1:3] = lines[2:0:-1]  # equal times keep the order of the file
    table, err = predict("\n".join(["seconds;buyer;item", *lines]), "--top-k", 4, "--eval-batch-size", 3)
    assert "Warning" not in err
    assert [(row["user"], row["rank"]) for row in table] == [(u, str(r)) for u in ("adam", "zoe") for r in range(1, 5)]
    for user, (items, times) in histories.items():
        expected = slow_scores(run, items, times).topk(4)
        rows = [row for row in table if row["user"] == user]
        assert [row["item"] for row in rows] == [name(i) for i in expected.indices.tolist()]
        assert [float(row["score"]) for row in rows] == pytest.approx(expected.values.tolist(), rel=1e-4)


def test_columns_of_a_new_file_are_used_and_unknown_ones_reported(trained, predict):
    plain = "user,item,time\nmia,item-004,7\nmia,item-777,8\ntom,item-888,9\n"
    flags = ["--user-column", "user", "--time-column", "time", "--top-k", 1]
    table, err = predict(plain, *flags)
    assert [row["user"] for row in table] == ["mia"]
    assert "2 of 3 interactions are left out, because the run was not trained on" in err and "item-777, item-888" in err
    assert "because the run was not trained on any of their items: tom" in err
    _, err = predict(plain, status=2)
    assert "--user-column buyer: " in err and "the columns are user, item, time" in err and err.count("error: ") == 1


@pytest.mark.parametrize(
    ("text", "more", "part"),
    [
        ("buyer,item,seconds\na,other,3\n", [], "ids as in the training data, such as item-001, item-002"),
        ("buyer,item,seconds\na,item-001,3\n", ["--top-k", NUM_ITEMS], f"to user a ({NUM_ITEMS - 1} left); "),
        ("buyer,item,seconds\na,item-001,x\n", [], "line 2: 'a item-001 x': 'x' is not a time"),
        ("", [], "is empty"),
    ],
)  # fmt: skip
def test_an_unusable_file_is_refused_with_its_flag(text, more, part, predict):
    _, err = predict(text, *more, status=2)
    assert part in err and "histories.csv" in err and "Traceback" not in err
    assert "--predict " in err and "--data-dir" not in err


@pytest.mark.parametrize(
    ("output", "part"),
    [
        ("run/best.pth", "could overwrite a file of the run"),
        ("run/logs/table.json", "could overwrite a file of the run"),
        ("log.csv", "would overwrite the run's --data-dir"),
    ],
)
def test_predicting_changes_no_file_of_the_run(output, part, trained, predict, tmp_path):
    path = tmp_path / output
    before = path.read_bytes() if path.exists() else None
    _, err = predict(HISTORY, "--output", path, status=2)
    assert f"--output {path}: {part}" in err
    assert (path.read_bytes() if path.exists() else None) == before
    inside = tmp_path / "run" / "table.csv"
    predict(HISTORY, "--output", inside)
    assert inside.read_text().startswith("user,rank,item,score\n")


def test_a_model_trained_with_times_requires_times(trained, predict):
    text = "buyer,item\na,item-001\n"
    with_times = trained[1]
    _, err = predict(text, "--time-column", "none", status=2 if with_times else 0)
    assert ("has no times, but the run was trained with times" in err) == with_times


def test_item_names_are_saved_with_the_run(trained):
    facts = json.loads((trained[0] / "config.json").read_text())["data_facts"]
    assert facts["items"].split("\n") == sorted({name(i) for row in ITEMS for i in row})
    assert np.all(load_run(trained[0]).items.weight.shape == (NUM_ITEMS + 1, 8))
