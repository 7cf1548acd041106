"""The weights that a schedule-free optimizer averages are evaluated and saved, which does not change training."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tasks import TASKS
from tests.conftest import ROOT, assert_same_bits, load
from tests.helpers import forks
from tests.helpers.schedule_free_task import BETA, Free
from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Points, Shaped

LR = 0.05
ALL = type("Keys", (), {"index": slice(None)})
RUN = ["--task", "shaped", "--num-threads", 1, "--device", "cpu", "--dtype", "float64", "--lr", LR, "--save-dir"]


@pytest.fixture
def train(run_here, monkeypatch):
    monkeypatch.setitem(TASKS, "shaped", Free)

    def run(directory, max_steps, *more, status=0):
        _, err = run_here(*RUN, directory, "--max-steps", max_steps, *more, status=status)
        return err if status else load(directory / "final.pth")

    return run


def bare(start, num_steps):
    """Returns y and x of the paper after steps on all samples, and the validation loss of x."""
    train, val = (Points(num, seed).__getitems__(ALL) for num, seed in ((21, 1), (8, 2)))

    def loss(weights, samples):
        logits = F.linear(torch.from_numpy(samples["x"]).double(), weights["weight"], weights["bias"])
        return F.cross_entropy(logits, torch.from_numpy(samples["y"]))

    z = x = y = start
    for t in range(num_steps):
        leaves = {name: value.clone().requires_grad_() for name, value in y.items()}
        grads = torch.autograd.grad(loss(leaves, train), [*leaves.values()])
        z = {name: value - LR * grad for (name, value), grad in zip(z.items(), grads, strict=True)}
        x = {name: x[name] + (z[name] - x[name]) / (t + 1) for name in x}
        y = {name: (1 - BETA) * z[name] + BETA * x[name] for name in x}
    return y, x, float(loss(x, val))


def test_the_average_is_evaluated_and_saved(train, tmp_path, monkeypatch):
    start = nn.Linear(NUM_FEATURES, NUM_CLASSES).double()
    monkeypatch.setattr(Shaped, "build", lambda self: nn.Linear(NUM_FEATURES, NUM_CLASSES))
    monkeypatch.setattr(
        Shaped, "initialise", lambda self, objective: objective.model.load_state_dict(start.state_dict())
    )
    found = train(tmp_path, 4, "--global-batch-size", 21, "--batch-size", 21, "--no-test")
    trained, average, val_loss = bare({name: p.detach() for name, p in start.named_parameters()}, 4)
    for name, value in average.items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["training_model"][name], trained[name], rtol=1e-12, atol=1e-12)
    assert json.loads((tmp_path / "results.json").read_text())["metrics"]["val/loss"] == pytest.approx(val_loss, 1e-12)


def test_a_run_resumes_bit_identically_with_any_saves_and_evaluations(train, tmp_path):
    whole = train(tmp_path / "whole", 7)
    often = ("--save-every-steps", 1, "--eval-every-steps", 2, "--eval-start")
    for max_steps in (1, 2, 5, 7):
        found = train(tmp_path / "often", max_steps, *often)
    for name in ("model", "training_model", "optimizers"):
        assert_same_bits(whole[name], found[name])
    assert found["optimizers"]["train"][0]["param_groups"][0]["train_mode"]


def test_the_test_set_is_scored_with_the_saved_best_weights(train, tmp_path):
    train(tmp_path, 6)
    tested = json.loads((tmp_path / "results.json").read_text())["metrics"]["test/loss"]
    best, samples = load(tmp_path / "best.pth")["model"], Points(8, 3).__getitems__(ALL)
    logits = F.linear(torch.from_numpy(samples["x"]).double(), best["weight"], best["bias"])
    assert tested == pytest.approx(float(F.cross_entropy(logits, torch.from_numpy(samples["y"]))), 1e-12)


def test_two_processes_evaluate_and_save_like_one(train, environment, tmp_path):
    one, out = train(tmp_path / "one", 5, "--global-batch-size", 8, "--batch-size", 4), tmp_path / "out.txt"
    task = ["--task", f"{ROOT / 'tests' / 'helpers' / 'schedule_free_task.py'}:Free", *RUN[2:], tmp_path / "two"]
    argv = ["--multi-gpu", "ddp", *task, "--max-steps", 5, "--global-batch-size", 8, "--batch-size", 4]
    assert forks.run_group(argv, 2, environment, out) == [0, 0], out.read_text()
    two = load(tmp_path / "two" / "final.pth")
    for name in ("model", "training_model"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-12, atol=1e-12)
    scores = [json.loads((tmp_path / name / "results.json").read_text())["metrics"] for name in ("one", "two")]
    assert scores[1] == pytest.approx(scores[0], 1e-12)


def test_two_averages_are_refused(train, tmp_path):
    err = train(tmp_path, 1, "--ema-decay", 0.9, status=2)
    assert err == ("error: --ema-decay 0.9: ScheduleFreeSGD averages the weights itself; leave the flag out\n")
