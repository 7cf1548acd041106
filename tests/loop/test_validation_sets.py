"""Each of several validation sets is scored like a single one, on any number of processes and after a resume."""

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks import TASKS
from tests.conftest import ROOT, assert_same_bits, cut_back_to, launcher, load, read_metrics, results_of
from tests.helpers.scored_task import Points, area_under_curve
from tests.helpers.shifted_task import SIZES, Shifted
from trainer.task import validation_sets

FILE = ROOT / "tests" / "helpers" / "shifted_task.py"
FLAGS = ["--dtype", "float64", "--epochs", 3, "--global-batch-size", 6, "--num-threads", 1, "--device", "cpu"]
SAVING = ["--save-every-steps", 3, "--keep-checkpoints", 0]
STEPS_PER_EPOCH = 5


def argv(name="Shifted"):
    return ["--task", f"{FILE}:{name}", *FLAGS]


def expected(model, num, seed):
    """Returns the loss and AUC of a linear model on a data set, by a plain loop over its points."""
    data = Points(num, seed)
    points, labels = torch.from_numpy(data.points).double(), torch.from_numpy(data.labels)
    scores = torch.stack([F.linear(point, model["weight"], model["bias"])[0] for point in points])
    losses = [F.softplus(-score if label else score) for score, label in zip(scores, labels, strict=True)]
    return {"loss": float(sum(losses)) / num, "auc": area_under_curve(scores, labels)}


def check_scores(directory):
    """Compares the scores of every epoch with a plain loop over its checkpoint, and checks the choice of the best."""
    for record in read_metrics(directory, "epoch"):
        model = load(directory / f"checkpoint_{record['epoch']}.pth")["model"]
        for name, num in SIZES.items():
            for metric, value in expected(model, num, num).items():
                assert record[f"val/{name}/{metric}"] == pytest.approx(value, rel=1e-12)
    losses = [record["val/far/loss"] for record in read_metrics(directory, "epoch")]
    best = results_of(directory)["best"]
    epoch = losses.index(min(losses)) + 1
    at = {"epoch": epoch, "step": epoch * STEPS_PER_EPOCH}
    assert best == {**at, "monitor": "val/far/loss", "value": min(losses)}
    assert (directory / "best.pth").samefile(directory / f"checkpoint_{best['epoch']}.pth")


@pytest.mark.parametrize("world_size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_every_data_set_is_scored_like_a_plain_loop_even_after_a_resume(world_size, run_here, command, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    start = run_here if world_size == 1 else lambda *flags: command(*launcher(world_size), *flags)
    start(*argv(), *SAVING, "--batch-size", 2, "--eval-batch-size", 3, "--save-dir", whole)
    check_scores(whole)
    cut_back_to(whole, STEPS_PER_EPOCH + 1, resumed)
    start(*argv(), *SAVING, "--batch-size", 2, "--eval-batch-size", 3, "--save-dir", resumed)
    assert_same_bits(load(whole / "final.pth"), load(resumed / "final.pth"))
    assert read_metrics(whole, "epoch") == read_metrics(resumed, "epoch")


def test_without_the_test_set_the_last_weights_are_scored_on_all_validation_sets(run_here, tmp_path):
    out, _ = run_here(*argv(), "--no-test", "--save-dir", tmp_path)
    results, last = results_of(tmp_path), load(tmp_path / "final.pth")["model"]
    metrics = {f"val/{name}/{metric}" for name in SIZES for metric in ("loss", "auc")}
    assert results["scored"] == "val" and results["metrics"].keys() == metrics
    for name, num in SIZES.items():
        assert results["metrics"][f"val/{name}/loss"] == pytest.approx(expected(last, num, num)["loss"], rel=1e-12)
        assert len(results[f"val/{name}"]["scores"]) == num
    assert "val/far/auc" in out
    board = EventAccumulator(str(tmp_path / "logs"))
    board.Reload()
    assert {"val/near/loss", "val/far/loss"} <= set(board.Tags()["scalars"])
    assert {"val/near/labels", "val/far/labels"} <= set(board.Tags()["images"])


def test_an_unnamed_validation_set_is_scored_beside_named_sets(run_here, tmp_path):
    run_here(*argv("AndPlain"), "--save-dir", tmp_path)
    results = results_of(tmp_path)
    epochs = read_metrics(tmp_path, "epoch")
    assert results["best"]["value"] == max(record["val/auc"] for record in epochs)
    assert {"val/loss", "val/far/loss", "val/near/loss"} <= epochs[0].keys()
    assert len(results["scores"]) == 7  # only the test set
    out, _ = run_here(*argv("AndPlain"), "--eval-only", "--save-dir", tmp_path)
    *_, plain, far, near, test = out.splitlines()
    model = load(tmp_path / "best.pth")["model"]
    of_sets = {"val": (plain, 6, 6), "val/far": (far, 2, 2), "val/near": (near, 11, 11), "test": (test, 7, 2)}
    for name, (line, num, seed) in of_sets.items():
        assert line == ", ".join(f"{name}/{metric} {value:.4f}" for metric, value in expected(model, num, seed).items())


def test_the_table_shows_the_headline_metric_of_each_validation_set(run_here, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "headline", type("Headline", (Shifted,), {"headline": ("auc",)}))
    run_here("--task", "headline", *FLAGS, "--save-dir", tmp_path)
    heading, *rows = [line.split() for line in (tmp_path / "val.log").read_text().splitlines()][:4]
    assert heading == ["epoch", "val/far/auc", "val/near/auc", "samples_per_second", "epoch_seconds"]
    for row, record in zip(rows, read_metrics(tmp_path, "epoch"), strict=True):
        assert row[:3] == [str(record["epoch"]), *(f"{record[f'val/{name}/auc']:.5g}" for name in ("far", "near"))]


def test_validation_sets_are_sorted_by_name(run_here, tmp_path, monkeypatch):
    """The order of `splits` may come from a folder's listing, and differ between processes."""
    assert validation_sets(["val/b", "train", "val", "validation", "val/a", "test"]) == ["val", "val/a", "val/b"]
    monkeypatch.setitem(TASKS, "other", type("Other", (Shifted,), {"order_of_sets": ("far", "near")}))
    for name in (f"{FILE}:Shifted", "other"):
        run_here("--task", name, *FLAGS, "--save-dir", tmp_path / name[-5:])
    assert read_metrics(tmp_path / "other", "epoch") == read_metrics(tmp_path / "ifted", "epoch")


def test_patience_uses_the_monitored_metric(run_here, tmp_path):
    """The learning rate is almost 0, so the first score stays the best."""
    run_here(*argv(), "--epochs", 9, "--lr", 1e-30, "--early-stopping-patience", 2, "--save-dir", tmp_path)
    results = results_of(tmp_path)
    assert (results["best"]["epoch"], results["epochs"]) == (1, 3)
