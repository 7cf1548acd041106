"""`--predict` with a user's task labels the task's files, or says that it cannot."""

import os
import signal
import sys

import numpy as np
import pytest
import torch

from examples.own_task import SpiralFlags
from tests.conftest import ROOT, load
from trainer.checkpoint.weights import find_weights
from trainer.commands.parse import parse
from trainer.commands.weights import rebuild_task

OF_RUN = "From the run in {}: --num-points 64, --hidden-units 7"
OWN_TASK = """
import os
import numpy as np
from examples.own_task import Spirals
from tests.helpers.points import Points

class Labelling(Spirals):
    def new_data(self, path):
        points = np.loadtxt(path, dtype=np.float32, ndmin=2)
        return points if path.name == "bare.txt" else Points(points)

    def predictions(self, objective, batch):
        if int(batch["index"][0]) > 0 and "END_BY" in os.environ:
            os.kill(os.getpid(), int(os.environ["END_BY"]))
        return {"arm": objective.model(batch["point"]).argmax(1).tolist(), "id": batch["index"].tolist()}
"""
POINTS = "0.1 0.2\n-0.3 0.4\n0.5 0.5\n0.2 -0.9\n"


@pytest.fixture
def own_run(on_cpu, tmp_path):
    """Yields the file of a user's task, the directory of its run, and a file to label."""
    task, points = tmp_path / "first_place.py", tmp_path / "points.txt"
    task.write_text(OWN_TASK)
    points.write_text(POINTS)
    on_cpu("--task", f"{task}:Labelling", "--hidden-units", 7, "--num-points", 64, "--epochs", 1, "--num-threads", 1,
           "--save-dir", tmp_path / "run")  # fmt: skip
    yield task, tmp_path / "run", points
    sys.modules.pop("first_place", None)


def test_a_custom_task_labels_its_files(own_run, on_cpu, tmp_path):
    task, run, points = own_run
    named = ["--task", f"{task}:Labelling"]
    out, err = on_cpu("--predict", points, "--save-dir", run, *named, "--num-threads", 1)
    weights = load(run / "best.pth")["model"]
    assert weights["0.weight"].shape == (7, 2)
    gelu = torch.nn.functional.gelu
    x = gelu(torch.from_numpy(np.loadtxt(points, dtype=np.float32)) @ weights["0.weight"].T + weights["0.bias"])
    arms = (gelu(x @ weights["2.weight"].T + weights["2.bias"]) @ weights["4.weight"].T + weights["4.bias"]).argmax(1)
    assert (out, err) == ("arm,id\n" + "".join(f"{arm},{i}\n" for i, arm in enumerate(arms)), [OF_RUN.format(run)])
    bare = points.rename(points.with_name("bare.txt"))
    _, refusal = on_cpu("--predict", bare, "--save-dir", run, *named, status=2)
    (line,) = refusal
    assert "bare.txt: ndarray has no `__getitems__(keys)`; return trainer.from_dataset(" in line
    bare.rename(points)
    relative = ["--task", f"{os.path.relpath(task)}:Labelling"]
    assert on_cpu("--predict", points, "--save-dir", run, *relative, "--num-threads", 1) == (out, err)
    (tmp_path / "elsewhere").mkdir()
    moved = task.rename(tmp_path / "elsewhere" / "first_place.py")
    sys.modules.pop("first_place")
    there = ["--task", f"{moved}:Labelling"]
    assert on_cpu("--predict", points, "--save-dir", run, *there, "--num-threads", 1) == (out, err)


def test_a_predict_flag_keeps_the_value_of_the_run_unless_it_is_given(own_run):
    task, run, _ = own_run
    trained = find_weights(run, {}, print)
    assert SpiralFlags.hidden_units == 64
    for argv, expected in ([], 7), (["--hidden-units", "64"], 64):
        flags, problems = parse(["--task", f"{task}:Labelling", *argv], several_devices=False)
        assert problems == []
        flags.task_type.predict_flags = ("hidden_units",)
        assert rebuild_task(trained, flags).config.hidden_units == expected


def test_a_task_without_predictions_says_so(on_cpu, cache_dir, tmp_path):
    run, points = tmp_path / "run", tmp_path / "points.txt"
    points.write_text(POINTS)
    own = ["--task", f"{ROOT}/examples/own_task.py:Spirals", "--num-points", 64, "--epochs", 1, "--num-threads", 1]
    on_cpu(*own, "--cache-dir", cache_dir, "--save-dir", run)
    _, err = on_cpu("--predict", points, "--save-dir", run, status=2)
    assert err == [
        f"error: --predict {points}: the task Spirals of this run has no `new_data`, so it cannot label files"
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_kill_leaves_no_partial_file(number, own_run, command, tmp_path, monkeypatch):
    """The signal arrives between two batches. The file is written only when the table is complete."""
    task, run, points = own_run
    output = tmp_path / "labels.csv"
    output.write_text("precious")
    before = sorted(tmp_path.iterdir())
    argv = ["--predict", points, "--save-dir", run, "--task", f"{task}:Labelling", "--output", output]
    argv += ["--eval-batch-size", 2, "--num-threads", 1]
    done = command("main.py", *argv, status=-number, END_BY=str(int(number)))
    assert (done.stdout, done.stderr) == ("", OF_RUN.format(run) + "\n")
    assert output.read_text() == "precious" and sorted(tmp_path.iterdir()) == before


def test_a_failure_keeps_existing_files(own_run, on_cpu, tmp_path, monkeypatch):
    """The failure occurs between two batches."""
    task, run, points = own_run
    output = tmp_path / "labels.csv"
    output.write_text("precious")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setenv("END_BY", "no number")
    argv = ["--predict", points, "--save-dir", run, "--task", f"{task}:Labelling", "--output", output]
    argv += ["--eval-batch-size", 2, "--num-threads", 1]
    _, err = on_cpu(*argv, status=1)
    assert err[-1].startswith("error: failed in the predictions: ValueError")
    assert output.read_text() == "precious" and sorted(tmp_path.iterdir()) == before
