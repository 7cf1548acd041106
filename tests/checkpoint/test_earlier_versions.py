"""Runs of earlier versions resume, and end with the weights that those versions reached.

`tests/data_of_runs` holds a run directory of commit cc51570 and a checkpoint of a796ab4. Both stopped after 10 of 12
steps, in mid-epoch, with momentum in the optimizer. The earlier version computed `ended.json`: the sum, norm and sum
weighted by position of each weight after the last step.
"""

import json
import shutil

import pytest
import torch

from tests.conftest import load
from tests.helpers.forks import ROOT

RUNS = ROOT / "tests" / "data_of_runs"
ARGV = [
    "--task", "tabular", "--num-tables", "24", "--num-val-tables", "2", "--min-rows", "32", "--max-rows", "40",
    "--min-features", "2", "--max-features", "3", "--max-classes", "3", "--width", "8", "--num-blocks", "1",
    "--num-heads", "2", "--batch-size", "4", "--num-threads", "1", "--device", "cpu", "--epochs", "2", "--lr", "0.01",
    "--optimizer", "sgd", "--momentum", "0.9", "--keep-checkpoints", "1",
]  # fmt: skip


def summary(weights):
    """Returns three numbers of each weight, which together detect any difference."""
    numbers = {name: weight.double().flatten() for name, weight in weights.items()}
    return {
        name: [float(w.sum()), float(w.norm()), float(w @ torch.arange(len(w), dtype=w.dtype))]
        for name, w in numbers.items()
    }


def assert_ended_as_there(directory):
    final = load(directory / "final.pth")
    expected = json.loads((RUNS / "ended.json").read_text())
    found = summary(final["model"])
    assert (final["step"], found.keys()) == (12, expected.keys())
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=1e-5, abs=1e-5), name


def test_a_run_directory_resumes(run_here, tmp_path):
    shutil.copytree(RUNS / "cc51570", tmp_path / "run")
    run_here(*ARGV, "--save-dir", tmp_path / "run")
    assert_ended_as_there(tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "epoch"] == [0, 6, 12]
    best = json.loads((tmp_path / "run" / "manifest.json").read_text())["checkpoints"][0]
    assert (best["file"], best["best"]) == ("checkpoint_0.pth", True)


def test_a_checkpoint_resumes_in_another_directory(run_here, tmp_path):
    run_here(*ARGV, "--save-dir", tmp_path / "run", "--resume-from", RUNS / "a796ab4.pth")
    assert_ended_as_there(tmp_path / "run")
