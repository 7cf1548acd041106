"""Tests KGAT and its baselines: on any number of devices, after a kill anywhere, and what users see."""

import csv
import json
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks import kgat
from tasks.pictures import draw_bars
from tests.conftest import load
from tests.helpers.small_catalogue import NUM_ITEMS, NUM_RELATIONS, NUM_USERS, write_catalogue

SMALL = [
    "--model", "kgat", "--embed-dim", 6, "--layer-dims", 5, 4, "--relation-dim", 3, "--dropout", 0.2,
    "--node-dropout", 0.2,
]  # fmt: skip
RUN = ["--task", "kgat", "--dtype", "float64", "--num-threads", 1, "--epochs", 2, "--lr", 0.01, "--ks", 2, 5]
TWO = ["--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_catalogue(tmp_path_factory.mktemp("catalogue"))


def weights(directory):
    return load(directory / "final.pth")["model"]


def metrics(directory):
    return json.loads((directory / "results.json").read_text())["metrics"]


def assert_close(one, other, rtol=1e-9):
    assert weights(one).keys() == weights(other).keys()
    torch.testing.assert_close(weights(other), weights(one), rtol=rtol, atol=1e-11)
    assert metrics(other) == pytest.approx(metrics(one), rel=1e-9)


@pytest.mark.parametrize(
    "model", [["kgat", *SMALL], ["lightgcn", "--embed-dim", 6], ["kg-lightgcn"], ["bprmf"]], ids=lambda m: m[0]
)
def test_any_micro_batches_give_the_same_weights(model, data, run_here, tmp_path):
    argv = [*RUN, "--data-dir", data, "--model", *model, "--global-batch-size", 16]
    run_here(*argv, "--batch-size", 16, "--save-dir", tmp_path / "whole")
    run_here(*argv, "--batch-size", 5, "--eval-batch-size", 3, "--save-dir", tmp_path / "parts")
    assert_close(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_processes_gives_the_same_weights(nproc, data, run_here, command, tmp_path):
    argv = [*RUN, "--data-dir", data, *SMALL, "--global-batch-size", 16]
    run_here(*argv, "--save-dir", tmp_path / "one")
    several = ["--multi-gpu", "ddp", "--nproc", nproc, "--device", "cpu", "--batch-size", 3]
    command("main_multi_gpu.py", *argv, *several, "--save-dir", tmp_path / "several")
    assert_close(tmp_path / "one", tmp_path / "several")


def test_changed_interactions_are_reported(run_here, tmp_path):
    data, said = write_catalogue(tmp_path / "data"), "The split into training and held-out data differs from the"
    argv = [*RUN, "--data-dir", data, "--model", "bprmf", "--embed-dim", 4, "--save-dir", tmp_path / "run"]
    assert said not in run_here(*argv)[0]
    assert said not in run_here(*argv, "--epochs", 3)[0]
    first, *others = (data / "train.txt").read_text().splitlines()
    (data / "train.txt").write_text("\n".join([first.rpartition(" ")[0], *others]) + "\n")
    for more in (["--eval-only"], ["--epochs", 4]):
        assert said in run_here(*argv, *more)[0]


def test_resumes_bit_identically_from_any_step_of_either_phase(data, run_here, tmp_path):
    argv = [*RUN, "--data-dir", data, *SMALL, "--batch-size", 16, "--save-every-steps", 3, "--keep-checkpoints", 0]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    entries = json.loads((tmp_path / "whole" / "manifest.json").read_text())["checkpoints"]
    assert {load(tmp_path / "whole" / entry["file"])["position"]["phase"] for entry in entries} == {0, 1}
    for entry in entries[:-1]:
        directory = tmp_path / f"from-{entry['step']}"
        run_here(*argv, "--resume-from", tmp_path / "whole" / entry["file"], "--save-dir", directory)
        for name, value in weights(tmp_path / "whole").items():
            assert torch.equal(weights(directory)[name], value), (entry, name)
        assert metrics(directory) == metrics(tmp_path / "whole")


def test_resumes_bit_identically_after_a_kill_in_the_refresh(command, tmp_path):
    task = ["--task", "tests/helpers/small_catalogue.py:KilledInRefresh", *RUN[2:]]
    argv = [*task, "--data-dir", write_catalogue(tmp_path / "data"), *SMALL, "--batch-size", 16]
    command("main.py", *argv, "--save-dir", tmp_path / "killed", status=-9)
    for name in ("killed", "whole"):
        command("main.py", *argv, "--save-dir", tmp_path / name)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "killed")[name], value), name


def test_the_attention_is_refreshed_once_an_epoch(data, run_here, tmp_path):
    argv = [*RUN, "--data-dir", data, *SMALL, "--keep-checkpoints", 0, "--save-every-steps", 1]
    run_here(*argv, "--save-dir", tmp_path)
    entries = json.loads((tmp_path / "manifest.json").read_text())["checkpoints"]
    by_epoch = {}
    for entry in entries:
        state = load(tmp_path / entry["file"])
        if not (state["position"]["phase"] == 0 and state["position"]["samples"] == 0):
            by_epoch.setdefault(state["position"]["epoch"], []).append(state["model"]["attention"])
    first, second = by_epoch[0], by_epoch[1]
    assert all(torch.equal(values, first[0]) for values in first)
    assert all(torch.equal(values, second[0]) for values in second)
    assert not torch.allclose(first[0], second[0])


def test_each_validation_shows_the_attention_per_relation(data, run_here, tmp_path, monkeypatch):
    drawing = Mock(wraps=draw_bars)
    monkeypatch.setattr(kgat, "draw_bars", drawing)
    run_here(*RUN, "--data-dir", data, *SMALL, "--save-dir", tmp_path)
    shown = EventAccumulator(str(tmp_path / "logs"), size_guidance={"images": 0}).Reload()
    validated = [event.step for event in shown.Scalars("val/recall@2")]
    assert len(validated) == 2
    assert [event.step for event in shown.Images("val/attention_by_relation")] == validated
    assert [event.step for event in shown.Images("test/attention_by_relation")] == validated[1:]
    forward = ["interact", *(f"r{i}" for i in range(NUM_RELATIONS))]
    for (names, shares), _ in drawing.call_args_list:
        assert sorted(names) == sorted([*forward, *(f"{name}^-1" for name in forward)])
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
    # All attention of a user goes to its items, so the share equals the users' share of the nodes.
    triples = map(str.split, (data / "kg_final.txt").read_text().splitlines())
    nodes = NUM_USERS + len({node for head, _, tail in triples for node in (head, tail)})
    assert dict(zip(names, shares, strict=True))["interact"] == pytest.approx(NUM_USERS / nodes)


def test_kgat_starts_from_matrix_factorisation(data, run_here, tmp_path):
    run_here(*RUN, "--data-dir", data, "--model", "bprmf", "--embed-dim", 6, "--save-dir", tmp_path / "mf")
    start = ["--init-from-partial", tmp_path / "mf" / "best.pth"]
    out, _ = run_here(*RUN, "--data-dir", data, *SMALL, *start, "--lr", 1e-30, "--save-dir", tmp_path / "kgat")
    assert "users.weight, items.weight" in out or "items.weight, users.weight" in out
    for name in ("users.weight", "items.weight"):
        torch.testing.assert_close(weights(tmp_path / "kgat")[name], load(tmp_path / "mf" / "best.pth")["model"][name])


def test_results_say_what_the_epoch_was_selected_on(data, run_here, tmp_path):
    for more, expected in (([], "val"), (["--select-on-test"], "test")):
        directory = tmp_path / expected
        run_here(*RUN, "--data-dir", data, "--model", "bprmf", *more, "--save-dir", directory)
        results = json.loads((directory / "results.json").read_text())
        assert results["selected_on"] == expected
        if expected == "test":
            assert results["best"]["value"] == results["metrics"]["test/recall@2"]


def test_recommends_new_items_with_an_explaining_path(data, run_here, tmp_path):
    run_here(*RUN, "--data-dir", data, *SMALL, "--save-dir", tmp_path / "run")
    users = tmp_path / "users.csv"
    users.write_text("user\n4\n0\n")
    predict = ["--task", "kgat", "--predict", users, "--save-dir", tmp_path / "run", "--dtype", "float64"]
    short, _ = run_here(*predict, "--top-k", 3)
    out, _ = run_here(*predict)
    assert [line for line in out.splitlines() if line.split(",")[1] in ("rank", "1", "2", "3")] == short.splitlines()
    table = list(csv.DictReader(out.splitlines()))
    assert [(row["user"], row["rank"]) for row in table] == [(u, str(r)) for u in "40" for r in range(1, 11)]
    trained = [line.split() for line in (data / "train.txt").read_text().splitlines()]
    edges = {(int(h), f"r{r}", int(t)) for h, r, t in map(str.split, (data / "kg_final.txt").read_text().splitlines())}
    for user in (4, 0):
        rows = [row for row in table if row["user"] == str(user)]
        scores = [float(row["score"]) for row in rows]
        assert scores == sorted(scores, reverse=True)
        ranked = [row for row in rows if np.isfinite(float(row["score"]))]
        assert not {row["item"] for row in ranked} & set(trained[user][1:])
        for row in ranked:
            assert row["path"].startswith(f"user {user} -interact-> item ")
            assert row["path"].endswith(f" {row['item']}")
            assert_is_path(row["path"].split(), edges)


@pytest.mark.parametrize("model", ["kgat", "lightgcn"])
def test_bf16_trains_on_a_cpu(model, data, run_here, tmp_path):
    argv = ["--task", "kgat", "--data-dir", data, "--model", model, "--max-steps", 1, "--save-dir", tmp_path / "run"]
    run_here(*argv, "--amp", "bf16", "--device", "cpu")


def test_a_run_on_named_users_labels_its_own_sample(run_here, tmp_path):
    names = ['ann "a", b', "bob", "carl"]
    rows = [[name, f"i{item}", item] for name in names for item in range(9)]
    with (tmp_path / "ratings.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["user", "item", "time"], *rows])
    here = ["--task", "kgat", "--data-dir", tmp_path / "ratings.csv", "--save-dir", tmp_path / "run"]
    run_here(*here, "--model", "popularity", "--val-share", 0.3)
    run_here(*here, "--sample", tmp_path / "sample.csv")
    out, _ = run_here(*here, "--predict", tmp_path / "sample.csv", "--top-k", 1)
    assert [row["user"] for row in csv.DictReader(out.splitlines())] == names


@pytest.mark.parametrize("task", ["kgat", "seqrec"])
def test_items_with_equal_scores_have_a_fixed_order(task, run_here, tmp_path):
    rows = [f"{user},{item},{item}" for user in range(40) for item in range(user % 20, user % 20 + 10)]
    (tmp_path / "ratings.csv").write_text("\n".join(["user,item,time", *rows]))
    (tmp_path / "users.csv").write_text("user,item,time\n7,7,7\n" if task == "seqrec" else "user\n7\n")
    here = ["--task", task, "--data-dir", tmp_path / "ratings.csv", "--save-dir", tmp_path / "run"]
    run_here(*here, "--model", "popularity")
    predict = [*here, "--predict", tmp_path / "users.csv", "--top-k"]
    long = run_here(*predict, 15)[0].splitlines()
    assert len({line.rpartition(",")[2] for line in long}) < len(long) - 1
    for k in (1, 4, 9, 14):
        assert run_here(*predict, k)[0].splitlines() == long[: k + 1]


def assert_is_path(words, edges):
    nodes = list(zip(words[0::3], words[1::3], strict=True))
    for (kind, one), arrow, (_, other) in zip(nodes, words[2::3], nodes[1:], strict=False):
        if "interact" in arrow:
            assert (kind == "user") == arrow.endswith(">")
        elif arrow.endswith(">"):
            assert (int(one), arrow[1:-2], int(other)) in edges
        else:
            assert (int(other), arrow[2:-1], int(one)) in edges


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4\nfour\n", "line 2: 'four'"),
        (f"user\n{NUM_USERS}\n", f"line 2: '{NUM_USERS}'"),
        ("9" * 5000, "line 1: '999"),
        ("", "contains no samples"),
    ],
)
def test_unknown_users_are_refused(text, said, data, run_here, tmp_path):
    run_here(*RUN, "--data-dir", data, "--model", "bprmf", "--epochs", 1, "--save-dir", tmp_path / "run")
    (tmp_path / "users.txt").write_text(text)
    _, err = run_here("--predict", tmp_path / "users.txt", "--save-dir", tmp_path / "run", status=2)
    assert said in err and "users.txt" in err


def test_flags_that_a_model_ignores_are_refused(data, run_here, tmp_path):
    argv = ["--task", "kgat", "--data-dir", tmp_path / "none", "--model", "lightgcn", "--aggregator", "gcn"]
    _, err = run_here(*argv, "--save-dir", tmp_path / "run", status=2)
    assert "--aggregator gcn: --model lightgcn does not use it" in err
    assert f"--data-dir {tmp_path / 'none'}: no such file or folder" in err


def test_a_model_that_uses_a_graph_requires_one(data, run_here, tmp_path):
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    _, err = run_here(*RUN, "--data-dir", tmp_path, "--save-dir", tmp_path / "run", status=2)
    assert "has no graph" in err and "--model lightgcn" in err
    run_here(*RUN, "--data-dir", tmp_path, "--model", "lightgcn", "--save-dir", tmp_path / "run")


@pytest.mark.slow
def test_recall_hardly_depends_on_amp(run_here, tmp_path):
    run_here("--task", "kgat", "--model", "kgat", "--epochs", 15, "--num-threads", 1, "--save-dir", tmp_path / "run")
    recalls = []
    for amp in ("off", "bf16"):
        out, _ = run_here("--task", "kgat", "--eval-only", "--amp", amp, "--save-dir", tmp_path / "run")
        recalls.append(float(re.search(r"test/recall@20 ([0-9.]+)", out)[1]))
    assert recalls[1] == pytest.approx(recalls[0], abs=0.002)
    assert recalls[0] > 0.08


@pytest.mark.slow
def test_two_processes_resume_bit_identically(data, command, tmp_path):
    argv = [*RUN, "--data-dir", data, *SMALL, *TWO, "--batch-size", 4, "--save-every-steps", 4, "--keep-checkpoints", 0]
    command("main_multi_gpu.py", *argv, "--save-dir", tmp_path / "whole")
    entries = json.loads((tmp_path / "whole" / "manifest.json").read_text())["checkpoints"]
    for entry in entries[1:-1:3]:
        directory = tmp_path / f"from-{entry['step']}"
        command(
            "main_multi_gpu.py", *argv, "--resume-from", tmp_path / "whole" / entry["file"], "--save-dir", directory
        )
        for name, value in weights(tmp_path / "whole").items():
            assert torch.equal(weights(directory)[name], value), (entry, name)


def test_held_out_items_do_not_depend_on_the_seed(run_here, tmp_path):
    """Otherwise a run that starts from one with another seed would be scored on items that the latter trained on."""
    run_here("--task", "kgat", "--model", "bprmf", "--epochs", 1, "--num-threads", 1, "--save-dir", tmp_path)
    scored = [
        re.search(r"Evaluating .*", run_here("--task", "kgat", "--model", "bprmf", "--eval-only", "--seed", seed,
                                             "--save-dir", tmp_path)[0], re.DOTALL)[0]
        for seed in (0, 1)
    ]  # fmt: skip
    assert scored[0] == scored[1].replace("Changed since the checkpoint: --seed 0 -> 1\n", "")


def test_no_more_is_recommended_than_a_user_has_left(data, run_here, tmp_path):
    run_here(*RUN, "--data-dir", data, "--model", "bprmf", "--epochs", 1, "--save-dir", tmp_path / "run")
    (tmp_path / "users.txt").write_text("3\n")
    predict = ["--task", "kgat", "--predict", tmp_path / "users.txt", "--save-dir", tmp_path / "run"]
    _, err = run_here(*predict, "--top-k", NUM_ITEMS, status=2)
    num_left = int(re.search(r"only (\d+) items are left to recommend to user 3;", err)[1])
    out, _ = run_here(*predict, "--top-k", num_left)
    assert "inf" not in out and len(out.splitlines()) == 1 + num_left


@pytest.mark.parametrize("model", [["kgat", *SMALL], ["bprmf"]], ids=lambda m: m[0])
def test_unused_item_ids_are_neither_ranked_nor_recommended(model, run_here, tmp_path):
    data = write_catalogue(tmp_path / "data")
    shifted = {n: n + 100 * (n >= 3) for n in range(NUM_ITEMS)}  # items 3 to 102 do not occur
    for name in ("train.txt", "test.txt"):
        rows = [line.split() for line in (data / name).read_text().splitlines()]
        lines = [" ".join([user, *(str(shifted[int(item)]) for item in items)]) for user, *items in rows]
        (data / name).write_text("\n".join(lines))
    triples = [list(map(int, line.split())) for line in (data / "kg_final.txt").read_text().splitlines()]
    new = [(shifted.get(h, h + 100), r, shifted.get(t, t + 100)) for h, r, t in triples]
    (data / "kg_final.txt").write_text("".join(f"{h} {r} {t}\n" for h, r, t in new))
    run = tmp_path / "run"
    out, _ = run_here(*RUN, "--data-dir", data, "--model", *model, "--epochs", 1, "--save-dir", run)
    said = r"(\d+) of the (\d+) item ids, such as \d+, are never recommended, because they occur in no "
    num_hidden, num_ids = map(int, re.search(said, out).groups())
    assert num_hidden >= 100
    (tmp_path / "users.csv").write_text("user_id\n3\n0\n")
    predict = ["--task", "kgat", "--predict", tmp_path / "users.csv", "--save-dir", run, "--top-k"]
    _, err = run_here(*predict, NUM_ITEMS + 100, status=2)
    num_left = int(re.search(r"only (\d+) items are left to recommend", err)[1])
    out, _ = run_here(*predict, num_left)
    items = [int(row["item"]) for row in csv.DictReader(out.splitlines())]
    assert len(items) == 2 * num_left and not set(items) & set(range(3, 103)) and "inf" not in out
    out, _ = run_here("--task", "kgat", "--data-dir", data, "--save-dir", run, "--export", run.parent / "model.pt2")
    scores = torch.export.load(run.parent / "model.pt2").module()(torch.tensor([3, 0]))
    assert torch.isinf(scores).sum(1).tolist() == [num_hidden] * 2 and scores.shape == (2, num_ids)
