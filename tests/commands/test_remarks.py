"""Remarks of a task about its data reach the user, and a task may do other work instead of training."""

import sys

import pytest

TASK = """
from pathlib import Path

import numpy as np

from examples.own_task import Spirals
from tests.helpers.points import Points
from trainer.common.errors import UserError


class Speaking(Spirals):
    said = ["12 points have no arm.", "Points lie far apart."]

    def remarks(self):
        return self.said

    def other_work(self):
        if self.config.num_points == 7:
            raise UserError("--num-points 7: cannot be written")
        if self.config.num_points != 8:
            return None
        Path("points.txt").write_text("eight")
        return "Wrote points.txt: 8 points."

    def new_data(self, path):
        self.said = ["One column is not used."]
        return Points(np.zeros((3, 2), np.float32))

    def predictions(self, objective, batch):
        return {"arm": objective.model(batch["point"]).argmax(1).tolist()}
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "speaking_task.py").write_text(TASK)
    yield ["--task", f"{tmp_path / 'speaking_task.py'}:Speaking", "--hidden-units", 7, "--num-threads", 1]
    sys.modules.pop("speaking_task", None)


def test_remarks_are_shown_at_the_start_and_with_predictions(task, on_cpu, tmp_path):
    out, _ = on_cpu(*task, "--num-points", 64, "--epochs", 1, "--save-dir", tmp_path / "run")
    assert "12 points have no arm.\nPoints lie far apart.\n" in out
    out, _ = on_cpu(*task, "--num-points", 64, "--eval-only", "--save-dir", tmp_path / "run")
    assert "12 points have no arm.\n" in out
    (tmp_path / "new.txt").touch()
    out, err = on_cpu(*task, "--predict", tmp_path / "new.txt", "--save-dir", tmp_path / "run")
    assert out.splitlines()[0] == "arm" and "arm." not in out
    assert err == [f"From the run in {tmp_path / 'run'}: --num-points 64", "One column is not used."]


def test_other_work_of_a_task_replaces_training_and_creates_no_run(task, on_cpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, _ = on_cpu(*task, "--num-points", 8, "--save-dir", tmp_path / "run")
    assert out == "Wrote points.txt: 8 points.\n"
    assert (tmp_path / "points.txt").read_text() == "eight"
    assert not (tmp_path / "run").exists()
    _, err = on_cpu(*task, "--num-points", 7, "--save-dir", tmp_path / "run", status=2)
    assert err == ["error: --num-points 7: cannot be written"]
