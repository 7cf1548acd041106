"""A new run begins with the weights that come with its task, and commands without a run use them."""

import json
import shutil
import sys

import pytest
import torch

from tests.conftest import load

TASK = """
from pathlib import Path

import numpy as np

from examples.own_task import Spirals
from tests.helpers.points import Points


class WithWeights(Spirals):
    @property
    def trains(self):
        return self.config.noise > 0

    def shipped_weights(self):
        return Path(__file__).with_name("shipped.pth")

    def new_data(self, path):
        return Points(np.loadtxt(path, dtype=np.float32, ndmin=2))

    def predictions(self, objective, batch):
        return {"arm": objective.model(batch["point"]).argmax(1).tolist()}
"""
SMALL = ["--hidden-units", 7, "--num-points", 64, "--num-threads", 1]
OTHER = "--task examples/own_task.py:Spirals".split()


@pytest.fixture
def task(on_cpu, tmp_path):
    """Yields the value of --task. The same task without shipped weights trained the shipped weights."""
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "spirals_with_weights.py").write_text(TASK)
    on_cpu(*OTHER, *SMALL, "--epochs", 3, "--save-dir", tmp_path / "made")
    state = load(tmp_path / "made" / "best.pth")
    state["task"] = f"{folder / 'spirals_with_weights.py'}:WithWeights"
    torch.save(state, folder / "shipped.pth")
    yield state["task"]
    sys.modules.pop("spirals_with_weights", None)


@pytest.fixture
def points(tmp_path):
    path = tmp_path / "points.txt"
    path.write_text("0.1 0.2\n-0.3 0.4\n0.5 0.5\n0.2 -0.9\n")
    return path


def test_a_new_run_starts_with_the_shipped_weights(task, on_cpu, tmp_path):
    out, _ = on_cpu("--task", task, *SMALL, "--max-steps", 1, "--lr", 1e-9, "--save-dir", tmp_path / "new")
    assert "Starting with the weights that come with this task: 6 of the model's 6." in out
    made, tuned = (load(tmp_path / name)["model"] for name in ("made/best.pth", "new/final.pth"))
    torch.testing.assert_close(tuned, made, rtol=0, atol=1e-7)
    out, _ = on_cpu(
        "--task", task, *SMALL, "--max-steps", 1, "--save-dir", tmp_path / "given", "--init-from",
        tmp_path / "new" / "final.pth",
    )  # fmt: skip
    assert "come with this task" not in out


def test_shipped_weights_are_used_without_a_run(task, points, on_cpu, tmp_path):
    out, _ = on_cpu("--task", task, "--predict", points, "--save-dir", tmp_path / "none", "--num-threads", 1)
    made = ["--predict", points, "--resume-from", tmp_path / "task" / "shipped.pth", "--num-threads", 1]
    assert out == on_cpu("--task", task, *made)[0]
    out, _ = on_cpu("--task", task, *SMALL, "--eval-only", "--save-dir", tmp_path / "none")
    assert "Evaluating the weights that come with " in out
    (kept,) = map(json.loads, (tmp_path / "none" / "scores.jsonl").read_text().splitlines())
    assert kept["weights"].startswith("the weights that come with ") and kept["config"]["--eval-only"]
    assert f"test/accuracy {kept['metrics']['test/accuracy']:.4f}" in out


def test_a_run_in_a_given_folder_is_preferred(task, points, on_cpu, tmp_path):
    on_cpu("--task", task, *SMALL, "--max-steps", 1, "--save-dir", tmp_path / "run")
    out, _ = on_cpu("--task", task, *SMALL, "--eval-only", "--save-dir", tmp_path / "run")
    assert f"Evaluating the weights of optimizer step 1 in {tmp_path / 'run'}." in out


def test_a_run_of_another_task_is_refused(task, points, on_cpu, tmp_path):
    _, err = on_cpu("--task", task, "--predict", points, "--save-dir", tmp_path / "made", status=2)
    assert len(err) == 1 and "leave it out" in err[0], err


def test_runs_of_each_task_have_their_own_folder(task, points, on_cpu, tmp_path, monkeypatch):
    shutil.copytree(tmp_path / "made", tmp_path / "checkpoints" / "Spirals")
    expected, _ = on_cpu("--task", task, "--predict", points, "--save-dir", tmp_path / "none", "--num-threads", 1)
    monkeypatch.chdir(tmp_path)
    assert on_cpu("--task", task, "--predict", points, "--num-threads", 1)[0] == expected
    on_cpu("--task", task, *SMALL, "--max-steps", 1)
    assert (tmp_path / "checkpoints" / "WithWeights" / "best.pth").is_file()


@pytest.mark.parametrize(
    "use",
    [["--predict", "points.txt"], ["--eval-only"], pytest.param(["--export", "x.pt2"], marks=pytest.mark.slow)],
)
def test_a_run_in_the_default_folder_is_ignored(use, task, points, on_cpu, tmp_path, monkeypatch):
    """Shipped weights are preferred to a run in the default folder, which --save-dir selects."""
    monkeypatch.chdir(tmp_path)
    folder, shipped = "checkpoints/WithWeights", f"Using the weights that come with {task}"
    others = f"{shipped}; to use the run in {folder} add --save-dir {folder}."
    argv = ["--task", task, *SMALL, *use]
    before, _ = on_cpu(*argv)
    on_cpu("--task", task, *SMALL, "--max-steps", 1, "--lr", 1)
    out, err = on_cpu(*argv)
    assert [*err, *out.splitlines()][0] == others
    assert out.replace(others, f"{shipped}.") == before
    out, err = on_cpu("--task", task, *use, "--save-dir", folder, "--num-threads", 1)
    for line in (f"Using the weights of optimizer step 1 in {folder}.", f"From the run in {folder}: --num-points 64"):
        assert any(said.startswith(line) for said in [*err, *out.splitlines()])
    assert out != before


def test_training_in_the_default_folder_resumes_there(task, on_cpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (1, 2):
        out, _ = on_cpu("--task", task, *SMALL, "--max-steps", steps)
    assert "Resuming after optimizer step 1" in out and "From the run" not in out


def test_settings_without_training_score_the_shipped_weights(task, on_cpu, tmp_path):
    argv = ["--task", task, *SMALL, "--noise", 0, "--save-dir", tmp_path / "none"]
    scored = on_cpu(*argv)[0]
    assert scored.partition("Next: add --predict FILE")[0] == on_cpu(*argv, "--eval-only")[0]
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["scores.jsonl"]
