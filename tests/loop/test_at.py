"""Tasks and schedules that depend on progress and scores match a bare loop, with and without a resume."""

import json
import math

import pytest
import torch

from tests.conftest import ROOT, assert_same_bits, cut_back, largest_difference, load
from tests.helpers import forks
from tests.helpers.remembering_task import loss_of
from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Points
from tests.helpers.told_task import Moving
from trainer.loading.order import EpochOrder

FILE, EPOCHS, LR = ROOT / "tests" / "helpers" / "told_task.py", 4, 0.5
RUN = ["--dtype", "float64", "--num-threads", 1, "--device", "cpu", "--epochs", EPOCHS, "--weight-decay", 0]
TOLD = ["--task", f"{FILE}:Told", "--global-batch-size", 8, "--batch-size", 4, *RUN]
FALLING = ["--task", f"{FILE}:Falling", *RUN]
PLATEAU = [*FALLING, "--schedule", "plateau", "--plateau-factor", 0.5, "--plateau-patience", 1]


def data(num, seed):
    x = torch.from_numpy(Points(num, seed).x)
    return x.double(), (x.sum(1) > 0).long()


def steps(epoch):
    """Returns (middle, samples) of each step of an epoch."""
    order = torch.from_numpy(EpochOrder(0, epoch, 0, 21).take(0, 21))
    return [((start + min(start + 8, 21)) // 2, order[start : start + 8]) for start in (0, 8, 16)]


def told():
    torch.manual_seed(0)
    pair, factor, least = Moving().double(), 1.0, math.inf
    optimizer = torch.optim.SGD(pair.student.parameters(), lr=LR)
    (x, y), val = data(21, 1), data(8, 2)
    for epoch in range(EPOCHS):
        for middle, index in steps(epoch):
            optimizer.param_groups[0]["lr"] = LR * 0.9**epoch * factor
            optimizer.zero_grad()
            (loss_of(pair, x[index], y[index]) / len(index)).backward()
            optimizer.step()
            pair.follow(0.05 * (1 + math.cos(math.pi * (epoch + middle / 21) / EPOCHS)))
        with torch.no_grad():
            loss = float(loss_of(pair, *val)) / 8
        factor, least = (factor if loss < least else factor / 4), min(loss, least)
    return pair, {"factor": factor, "least": least}


def on_plateau():
    torch.manual_seed(0)
    model, criterion = torch.nn.Linear(NUM_FEATURES, NUM_CLASSES).double(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, patience=0, threshold=0)
    (x, y), (of_val, its) = data(21, 1), data(8, 2)
    for epoch in range(EPOCHS):
        for _, index in steps(epoch):
            optimizer.zero_grad()
            criterion(model(x[index]), y[index]).backward()
            optimizer.step()
        with torch.no_grad():
            schedule.step(criterion(model(of_val), its))
    return model, optimizer.param_groups[0]["lr"]


def assert_resumes(run, argv, folder, cuts):
    entries = json.loads((folder / "whole" / "manifest.json").read_text())["checkpoints"]
    for i in cuts:
        cut_back(folder / "whole", entries[:i], folder / str(i))
        run(*argv, "--save-dir", folder / str(i))
        assert_same_bits(load(folder / "whole" / "final.pth"), load(folder / str(i) / "final.pth"))


def test_a_task_that_uses_progress_and_scores_matches_a_bare_loop(run_here, environment, tmp_path):
    argv = [*TOLD, "--save-every-steps", 1, "--keep-checkpoints", 0]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    two, out = ["--multi-gpu", "ddp", *TOLD, "--save-dir", tmp_path / "two"], tmp_path / "out.txt"
    assert forks.run_group(two, 2, environment, out) == [0, 0], out.read_text()
    pair, state = told()
    assert state["factor"] < 1
    for name in ("whole", "two"):
        final = load(tmp_path / name / "final.pth")
        assert largest_difference(final, {"model": pair.state_dict()}) < 1e-12
        assert final["task_state"] == pytest.approx(state, 1e-12)
        results = json.loads((tmp_path / name / "results.json").read_text())["metrics"]
        assert results["test/on_test"] == 1
    last = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert any({"train/on_train", "val/on_val"} <= each.get("metrics", each).keys() for each in last)
    assert_resumes(run_here, argv, tmp_path, (5, 10))


def test_a_plateau_schedule_equals_pytorchs_and_resumes_bit_identically(run_here, tmp_path):
    argv = [*PLATEAU, "--save-every-steps", 1, "--keep-checkpoints", 0]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    model, rate = on_plateau()
    final = load(tmp_path / "whole" / "final.pth")
    assert rate == LR * 0.5 ** final["rate_drops"] == LR / 8
    assert largest_difference(final, {"model": model.state_dict()}) < 1e-12
    assert_resumes(run_here, argv, tmp_path, (8, 11))


def test_a_plateau_schedule_respects_the_minimum_rate(run_here, tmp_path):
    run_here(*PLATEAU, "--min-lr", 0.15, "--log-interval", 1, "--save-dir", tmp_path)
    rates = [json.loads(line).get("learning_rate") for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {rate for rate in rates if rate is not None} == {0.5, 0.25, 0.15}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*FALLING, "--plateau-patience", 3), "--plateau-patience 3: --schedule constant does not use it"),
        (
            (*TOLD[2:], "--task", f"{FILE}:Forgetful"),
            "Forgetful.after_validation: model is a Forgetful, but must be a number, a string, None",
        ),
    ],
)
def test_invalid_flags_and_task_states_are_refused(argv, message, run_here, tmp_path):
    _, error = run_here(*argv, "--save-dir", tmp_path, status=2)
    assert message in error and "Traceback" not in error
