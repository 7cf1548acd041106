"""Tests simple recommenders as models of seqrec and kgat: scored, saved, resumed and used like trained ones."""

import csv
import json
import re
import shlex

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from benchmarks.simple import compared
from benchmarks.ties import write_shuffled
from tests.conftest import results_of
from tests.helpers.small_catalogue import write_catalogue
from tests.helpers.small_seqrec import write_interactions
from trainer.checkpoint.file import read_checkpoint
from trainer.profiling.cli import main as profile

TWO = ["--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu"]


@pytest.fixture(params=["seqrec rules", "seqrec itemknn", "seqrec ease", "seqrec popularity", "kgat itemknn",
                        "kgat ease"])  # fmt: skip
def argv(request, tmp_path):
    task, model = request.param.split()
    data = write_catalogue(tmp_path / "data") if task == "kgat" else write_interactions(tmp_path / "data.txt")
    more = ["--k-core", 0, "--maxlen", 6, "--global-batch-size", 16] if task == "seqrec" else []
    more += ["--epochs", 1] if model == "sasrec" else []
    return ["--task", task, "--model", model, "--data-dir", data, *more, "--num-threads", 1]


def test_a_fitted_run_is_scored_saved_resumed_and_loaded(argv, run_here, tmp_path):
    run = tmp_path / "run"
    run_here(*argv, "--save-dir", run)
    assert results_of(run)["scored"] == "test" and results_of(run)["step"] == 0
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["epoch", "result"]
    assert any(name.startswith("val/") for name in events[0])
    assert "This run is finished" in run_here(*argv, "--save-dir", run).out
    assert "Starting over" in run_here(*argv, "--save-dir", run, "--fresh").out
    shown = run_here("--save-dir", run, "--eval-only", "--num-threads", 1).out
    for name, value in results_of(run)["metrics"].items():
        assert f"{name} {value:.4f}" in shown
    people = tmp_path / "people.csv"
    people.write_text("user\n3\n" if "kgat" in argv else (tmp_path / "data.txt").read_text())
    run_here("--save-dir", run, "--predict", people, "--output", tmp_path / "table.csv", "--top-k", 2)
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert len(rows) >= 2 and rows[0]["rank"] == "1" and float(rows[0]["score"]) >= float(rows[1]["score"])


@pytest.mark.parametrize(
    "argv", ["seqrec rules", "seqrec sasrec", pytest.param("kgat itemknn", marks=pytest.mark.slow)], indirect=True
)
def test_two_processes_score_like_one(argv, run_here, command, tmp_path):
    run_here(*argv, "--save-dir", tmp_path / "one")
    out = command("main_multi_gpu.py", *TWO, *argv, "--save-dir", tmp_path / "two").stdout
    assert results_of(tmp_path / "two")["baselines"] == results_of(tmp_path / "one")["baselines"]
    if "sasrec" in argv:
        assert out.count("Simple baselines reach") == 1
        return
    assert results_of(tmp_path / "two")["metrics"] == pytest.approx(results_of(tmp_path / "one")["metrics"], rel=1e-12)
    one, two = (read_checkpoint(tmp_path / name / "final.pth", name)["model"] for name in ("one", "two"))
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)


@pytest.mark.parametrize("argv", ["seqrec ease"], indirect=True)
def test_progress_of_several_fitted_runs_counts_runs(argv, run_here, monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.logs.console.PLAIN_LINE_INTERVAL_S", 0)
    assert "0 of 2 runs; running: seed-0" in run_here(*argv, "--seeds", 2, "--save-dir", tmp_path / "runs").out


def test_settings_of_a_trained_model_are_refused(run_here):
    err = run_here("--task", "seqrec", "--model", "rules", "--hidden-units", "8", status=2).err
    assert "--hidden-units" in err and "--model" in err


def test_flags_of_learning_are_refused(argv, run_here, tmp_path):
    assert run_here(*argv, "--epochs", 5, "--lr", 0.1, "--save-dir", tmp_path / "run", status=2).err.splitlines() == [
        f"error: {name}: has no effect, because the other flags train nothing; leave it out"
        for name in ("--epochs", "--lr")
    ]
    assert not list((tmp_path / "run").glob("*.pth"))


def test_flags_that_need_steps_are_refused(run_here, cache_dir, capsys):
    argv = ["--task", "seqrec", "--model", "rules"]
    assert "fitted, not trained, and has no loss to check" in run_here(*argv, "--check-task", status=2).err
    assert profile(["step", *argv, "--cache-dir", str(cache_dir / "lockstep")]) == 2
    assert "its model is fitted without optimizer steps" in capsys.readouterr().err


def test_popularity_ranks_by_training_users(make_task, tmp_path):
    data = write_interactions(tmp_path / "data.txt")
    task = make_task("--task", "seqrec", "--model", "popularity", "--data-dir", data, "--k-core", 0)
    objective = task.build_objective()
    task.initialise(objective)
    train = task.splits()["train"]
    shares = objective.model.popularity.numpy() / len(np.unique(train.users))
    assert (np.argsort(shares[1:], kind="stable") == np.argsort(train.item_popularity[1:], kind="stable")).all()


def write_walks(path, next_item):
    """Writes 60 users who move eight times from an item to its next item."""
    rows = [(user, user % 12, 0) for user in range(60)]
    for user, item, _ in rows[:60]:
        for time in range(1, 9):
            item = next_item(item)
            rows.append((user, item, time))
    path.write_text("user item time\n" + "".join(f"{user} {item} {time}\n" for user, item, time in rows))
    return path


WALKS = [
    "--task", "seqrec", "--no-time", "--k-core", 0, "--hidden-units", 16, "--maxlen", 8, "--dropout", 0,
    "--num-threads", 1, "--ks", 1, 10, "--batch-size", 64,
]  # fmt: skip
USE_RULES = "On the validation data this run is not better than rules (val/ndcg@10 1.0000); to use it: python main.py "


def test_a_run_beaten_by_baselines_reports_their_scores(run_here, tmp_path):
    data = write_walks(tmp_path / "ring.txt", lambda item: (item + 1) % 12)
    argv = [*WALKS, "--data-dir", data, "--no-mask-seen", "--epochs", 1, "--lr", 1e-6]
    out = run_here(*argv, "--save-dir", tmp_path / "run").out
    assert USE_RULES in out and "val/ndcg@10 1.0000 (rules)" in out
    found = results_of(tmp_path / "run")["baselines"]
    assert next(iter(found)) == "rules" and set(found) == {"rules", "itemknn", "ease", "popularity"}
    [command] = re.findall(re.escape(USE_RULES) + "(.*)", out)
    assert "--model rules" in command and "--hidden-units" not in command
    run_here(*shlex.split(command))
    for name, value in results_of(tmp_path / "run-rules")["metrics"].items():
        assert found["rules"].get(name, value) == pytest.approx(value)
    mean = compared(tmp_path / "run")
    assert (mean["run"], mean["rules"]) == (pytest.approx(results_of(tmp_path / "run")["best"]["value"]), 1.0)
    [events] = (tmp_path / "run" / "logs" / "rules").iterdir()
    steps = [(e.step, v.tag, v.simple_value) for e in EventFileLoader(str(events)).Load() for v in e.summary.value]
    assert [(step, tag) for step, tag, _ in steps] == [(0, "val/ndcg@10"), (1, "val/ndcg@10")]
    without = run_here(*argv, "--no-baselines", "--save-dir", tmp_path / "without")
    assert "imple methods" not in without.out and results_of(tmp_path / "without")["baselines"] == {}
    same = results_of(tmp_path / "run")["metrics"]
    assert results_of(tmp_path / "without")["metrics"] == same


def test_a_run_that_beats_the_baselines_gets_no_advice(run_here, tmp_path):
    data = write_walks(tmp_path / "same.txt", lambda item: item)  # no table predicts the same item
    argv = [*WALKS, "--data-dir", data, "--no-mask-seen", "--epochs", 30, "--lr", 1e-2]
    out = run_here(*argv, "--eval-every", 30, "--save-dir", tmp_path / "run").out
    assert "Simple baselines reach val/ndcg@10" in out and "this run is not better than" not in out


def test_only_ties_are_shuffled(tmp_path):
    rows = [("b", f"i{place}", place // 5) for place in range(20)] + [("a", f"i{place}", place) for place in range(20)]
    source = tmp_path / "source.tsv"
    source.write_text("user\titem\ttime\n" + "".join(f"{user}\t{item}\t{time}\n" for user, item, time in rows))

    def read(name):
        lines = (tmp_path / name).read_text().splitlines()[1:]
        return [(user, item, int(time)) for user, item, time in map(str.split, lines)]

    assert write_shuffled(source, tmp_path / "shuffled.tsv", seed=0) == 16 / 38
    shuffled = read("shuffled.tsv")
    in_order = sorted(rows, key=lambda row: (row[0], row[2]))
    assert sorted(shuffled) == sorted(rows) and shuffled[:20] == in_order[:20] and shuffled != in_order
    assert [row[2] for row in shuffled] == [row[2] for row in in_order]
    write_shuffled(source, tmp_path / "kept.tsv", seed=None, num_users=1)
    assert read("kept.tsv") == in_order[:20]


def test_no_time_and_model_sasrec_name_the_same_run(run_here, tmp_path):
    data = write_walks(tmp_path / "ring.txt", lambda item: (item + 1) % 12)
    run = tmp_path / "run"
    argv = [*WALKS, "--data-dir", data, "--epochs", 1]
    run_here(*argv, "--save-dir", run)
    config = json.loads((run / "config.json").read_text())["config"]
    assert "--no-time" in argv and config["--model"] == "sasrec"
    again = run_here("--config", run / "config.json", "--save-dir", tmp_path / "again")
    assert results_of(tmp_path / "again")["metrics"] == results_of(run)["metrics"] and not again.err
    assert "This run is finished" in run_here(*argv, "--save-dir", run).out
    given = [word for word in argv if word != "--no-time"]
    assert "This run is finished" in run_here(*given, "--model", "sasrec", "--save-dir", run).out


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("seqrec --no-time --model rules", "--no-time and --model rules: cannot be combined; give only one of them"),
        ("seqrec --no-time --model tisasrec", "--no-time and --model tisasrec: cannot be combined; give only one"),
        ("seqrec --model itemknn --time-span 9", "--time-span 9: --model itemknn does not use it; leave it out, or"),
        ("seqrec --model rules --loss bce", "--loss bce: --model rules does not use it; leave it out, or choose"),
        ("seqrec --model ease --norm pre", "--norm pre: --model ease does not use it; leave it out, or choose"),
        ("kgat --select-on-test --val-share 0.1", "--val-share 0.1 and --select-on-test: cannot be combined; give"),
        ("kgat --model itemknn --loss bpr", "--loss bpr: --model itemknn does not use it; leave"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_one_line(run_here, tmp_path, words, refusal):
    task, *rest = words.split()
    [line] = run_here("--task", task, *rest, "--save-dir", tmp_path / "run", status=2).err.splitlines()
    assert refusal in line and not (tmp_path / "run").exists()


def test_flags_of_a_file_that_contradict_each_other_are_refused(run_here, tmp_path):
    (tmp_path / "flags.toml").write_text("task = 'seqrec'\nno-time = true\nmodel = 'tisasrec'")  # the default model
    assert "cannot be combined" in run_here("--config", tmp_path / "flags.toml", status=2).err
