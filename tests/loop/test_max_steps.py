"""Runs with a length in optimizer steps or minutes, and evaluations within an epoch, which do not change training.

test_phases.py compares runs that train in phases with a bare loop.
"""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest

from tasks import TASKS
from tests.conftest import ROOT, WEIGHTED, assert_same_bits, cut_back, load, read_metrics, results_of
from tests.helpers.weighted_task import Weighted
from trainer.commands.build import open_run
from trainer.loop.progress import Progress
from trainer.loop.schedule import lr_factor

STEPS_PER_EPOCH, LR = 5, 0.01
RUN = [
    "--task", WEIGHTED, "--num-train", 8 * STEPS_PER_EPOCH, "--batch-size", 8, "--lr", LR, "--num-threads", 1,
    "--keep-checkpoints", 0, "--log-interval", 1,
]  # fmt: skip
EVENTS = ("step", "epoch", "evaluation", "result")
# Sends SIGTERM to its own process in forward pass STOP_AT of evaluation.
INTERRUPTED = """
import os, signal
from tests.helpers.weighted_task import *

class Counted(WeightedObjective):
    num_evaluation = 0

    def forward(self, batch, phase="train"):
        self.num_evaluation += not self.training
        if not self.training and self.num_evaluation == int(os.environ["STOP_AT"]):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(batch, phase)

class Interrupted(Weighted):
    def build_objective(self):
        return Counted(Network(self.config.width, self.config.dropout), self.config.delay_s)
"""


def entries_of(directory):
    return json.loads((directory / "manifest.json").read_text())["checkpoints"]


def steps_of(directory, event):
    return [record["step"] for record in read_metrics(directory, event)]


def assert_same_run(a, b):
    for name in ("final.pth", "best.pth"):
        assert_same_bits(load(a / name), load(b / name))
    for event in EVENTS:
        assert read_metrics(a, event) == read_metrics(b, event), event


# --- the end of the run, and its schedule ------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps", [3, 5, 12])
def test_the_schedule_ends_at_the_last_step(max_steps, run_here, tmp_path):
    """The run ends in the first epoch, at its end, or in a later epoch."""
    run_here(*RUN, "--max-steps", max_steps, "--save-dir", tmp_path)
    rates = [record["learning_rate"] for record in read_metrics(tmp_path, "step")]
    expected = [LR * lr_factor(n + 0.5, max_steps / 10, max_steps, 0.0) for n in range(max_steps)]
    assert rates == pytest.approx(expected, rel=1e-12)
    epochs, rest = divmod(max_steps, STEPS_PER_EPOCH)
    assert steps_of(tmp_path, "epoch") == [STEPS_PER_EPOCH * (i + 1) for i in range(epochs)]
    assert steps_of(tmp_path, "evaluation") == ([max_steps] if rest else [])
    last = read_metrics(tmp_path, "evaluation" if rest else "epoch")[-1]
    assert {"train/loss", "val/loss"} <= last.keys()
    results = results_of(tmp_path)
    assert (results["step"], results["epochs"]) == (max_steps, epochs)
    assert load(tmp_path / "final.pth")["step"] == max_steps


@pytest.mark.parametrize(
    ("flags", "warmup"), [(["--warmup-steps", 3], 3), (["--warmup-epochs", 0.5], 2.5), (["--warmup-steps", 8], 8)]
)
def test_warm_up_is_given_in_steps_or_epochs(flags, warmup, run_here, tmp_path):
    run_here(*RUN, "--max-steps", 8, *flags, "--save-dir", tmp_path)
    rates = [record["learning_rate"] for record in read_metrics(tmp_path, "step")]
    assert rates == pytest.approx([LR * lr_factor(n + 0.5, warmup, 8, 0.0) for n in range(8)], rel=1e-12)


def test_warm_up_longer_than_the_run_is_refused(refused, tmp_path):
    run = [*RUN, "--max-steps", 8, "--save-dir", tmp_path]
    refused(["--warmup-steps 9: exceeds the 8 steps of the run; lower the warm-up or raise --max-steps"],
            *run, "--warmup-steps", 9)  # fmt: skip
    refused(["--warmup-epochs 2, which are 10 steps: exceeds the 8 steps of the run"], *run, "--warmup-epochs", 2)
    (tmp_path / "long.toml").write_text("warmup-steps = 9")
    refused([f"raise --max-steps (--warmup-steps is set in {tmp_path / 'long.toml'})"],
            *run, "--config", tmp_path / "long.toml")  # fmt: skip


def test_a_tasks_schedule_gets_the_number_of_steps(run_here, tmp_path):
    task = f"{ROOT / 'tests' / 'helpers' / 'token_task.py'}:OwnSchedule"
    argv = ["--task", task, "--lr", 0.5, "--max-steps", 7, "--log-interval", 1, "--batch-size", 64]
    run_here(*argv, "--num-threads", 1, "--save-dir", tmp_path)
    rates = [record["learning_rate"] for record in read_metrics(tmp_path, "step")]
    assert rates == [0.5 * (1 - step / 7) for step in range(7)]


def test_a_changed_limit_extends_or_ends_the_run(run_here, tmp_path):
    def train(max_steps):
        return run_here(*RUN, "--max-steps", max_steps, "--save-every-steps", 4, "--save-dir", tmp_path)[0]

    train(7)
    assert "results after 7 optimizer steps. To continue training, raise --max-steps" in train(7)
    assert "Resuming after optimizer step 7: epoch 2, 16 of 40 samples." in train(9)
    assert results_of(tmp_path)["step"] == 9
    assert steps_of(tmp_path, "evaluation") == [7, 9] and steps_of(tmp_path, "epoch") == [5]
    (other := tmp_path / "other").mkdir()
    cut_back(tmp_path, [entry for entry in entries_of(tmp_path) if entry["step"] <= 8], other / "run")
    run_here(*RUN, "--max-steps", 6, "--save-dir", other / "run")
    assert results_of(other / "run")["step"] == 8
    assert steps_of(other / "run", "evaluation") == [7, 8]


# --- evaluations within an epoch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [["--epochs", 3], ["--max-steps", 13]])
def test_evaluations_every_n_steps_do_not_change_training(length, run_here, tmp_path):
    """The run has augmentation, dropout and an average of the weights."""
    run = [*RUN, *length, "--dropout", 0.2, "--ema-decay", 0.9]
    run_here(*run, "--save-dir", tmp_path / "plain")
    out, _ = run_here(*run, "--eval-every-steps", 2, "--save-every-steps", 4, "--save-dir", tmp_path / "evaluated")
    plain, evaluated = (load(tmp_path / name / "final.pth") for name in ("plain", "evaluated"))
    for name in ("model", "training_model", "optimizers"):
        assert_same_bits({name: plain[name]}, {name: evaluated[name]})
    records = {event: read_metrics(tmp_path / "evaluated", event) for event in EVENTS}
    num_steps = 15 if "--epochs" in length else 13
    validated = [record["step"] for event in EVENTS for record in records[event] if "val/loss" in record]
    last = [num_steps] if num_steps % 2 else []
    assert sorted(validated) == [*range(2, num_steps, 2), *last]
    assert [record["step"] for record in records["epoch"]] == list(range(5, num_steps + 1, 5))
    # Each report covers the steps since the previous report.
    losses = {record["step"]: record["train/loss"] for record in records["step"]}
    first = min(records["evaluation"], key=lambda record: record["step"])
    assert first["train/num_samples"] == 16 and losses[1] != first["train/loss"]
    reports = sorted(records["epoch"] + records["evaluation"], key=lambda record: record["step"])
    of_first_epoch = [record for record in reports if record["step"] <= 5]
    assert sum(record["train/num_samples"] for record in of_first_epoch) == 40
    # Each report has one checkpoint, and --save-every-steps saves no second one.
    steps = [entry["step"] for entry in entries_of(tmp_path / "evaluated")]
    assert steps == sorted(set(steps)) == [record["step"] for record in reports]
    rows = [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows[:4] == ["0.400", "0.800", "1", "1.200"]


@pytest.mark.parametrize("more", [[], ["--eval-every-steps", 4]])
def test_a_run_resumes_bit_identically_from_any_checkpoint(more, run_here, tmp_path):
    """The resumed run drops the records after the checkpoint, and writes them again."""
    argv = [*RUN, "--max-steps", 9, *more, "--save-every-steps", 1, "--dropout", 0.2]
    whole = tmp_path / "whole"
    run_here(*argv, "--save-dir", whole)
    entries = entries_of(whole)
    for i in range(1, len(entries)):
        again = tmp_path / str(i)
        cut_back(whole, entries[:i], again)
        run_here(*argv, "--save-dir", again)
        assert_same_run(whole, again)


@pytest.mark.parametrize(("interval", "forward", "step"), [(3, 2, 3), (5, 2, 5), (3, 8, 6), (3, 13, 9)])
def test_an_interrupted_evaluation_runs_before_the_next_step(interval, forward, step, run_here, monkeypatch, tmp_path):
    """The interrupted evaluation is within an epoch, at the end of an epoch, the second, or the last."""
    file = tmp_path / f"interrupted_{os.getpid()}_{interval}_{forward}.py"
    file.write_text(INTERRUPTED)
    argv = ["--task", f"{file}:Interrupted", *RUN[2:], "--num-val", 5, "--eval-batch-size", 1, "--max-steps", 9]
    argv += ["--eval-every-steps", interval]
    monkeypatch.setenv("STOP_AT", "0")
    run_here(*argv, "--save-dir", tmp_path / "whole")
    run = tmp_path / "run"
    monkeypatch.setenv("STOP_AT", str(forward))
    run_here(*argv, "--save-dir", run, status=128 + signal.SIGTERM)
    state = load(run / "last.pth")
    assert state["last_report"] < state["step"] == step
    # A kill between logging the evaluation and saving leaves this record behind.
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"event": "evaluation", "step": step}) + "\n")
    monkeypatch.setenv("STOP_AT", "0")
    run_here(*argv, "--save-dir", run)
    assert_same_run(tmp_path / "whole", run)


def test_patience_counts_evaluations_within_an_epoch(run_here, tmp_path):
    """The learning rate is almost 0, so the first evaluation stays the best."""
    argv = [*RUN, "--lr", 1e-30, "--epochs", 9, "--eval-every-steps", 2, "--early-stopping-patience"]
    run_here(*argv, 2, "--save-dir", tmp_path)
    results = results_of(tmp_path)
    assert (results["step"], results["epochs"], results["best"]["step"], results["best"]["epoch"]) == (6, 1, 2, 0)
    assert load(tmp_path / "best.pth")["step"] == 2
    assert "Resuming after optimizer step 6" in run_here(*argv, 3, "--save-dir", tmp_path)[0]
    assert results_of(tmp_path)["step"] == 8


def test_the_best_within_an_epoch_is_found_without_the_manifest(run_here, tmp_path):
    argv = [*RUN, "--lr", 1e-30, "--max-steps", 9, "--eval-every-steps", 3]
    run_here(*argv, "--save-dir", tmp_path)
    for name in ("manifest.json", "best.pth", "last.pth", "final.pth"):
        (tmp_path / name).unlink()
    run_here(*argv, "--save-dir", tmp_path)
    assert load(tmp_path / "best.pth")["step"] == 3


def test_going_back_discards_a_later_best_of_the_same_epoch(run_here, tmp_path):
    argv = [*RUN, "--lr", 0.1, "--max-steps", 4, "--eval-every-steps", 1]
    run_here(*argv, "--save-dir", tmp_path)
    best = [entry["step"] for entry in entries_of(tmp_path) if entry["best"]]
    assert len(best) > 1
    last = next(entry["file"] for entry in entries_of(tmp_path) if entry["step"] == best[0])
    run_here(*argv, "--lr", 1e-30, "--max-steps", best[0] + 1, "--resume-from", tmp_path / last, "--save-dir", tmp_path)
    assert load(tmp_path / "best.pth")["step"] == best[0]


def test_the_best_within_an_epoch_is_copied_to_another_folder(run_here, tmp_path):
    argv = [*RUN, "--lr", 1e-30, "--max-steps", 4, "--eval-every-steps", 2]
    run_here(*argv, "--save-dir", tmp_path / "old")
    for last, expected in (("best.pth", 1), ("last.pth", 2)):
        new = tmp_path / last
        out, _ = run_here(*argv, "--max-steps", 5, "--resume-from", tmp_path / "old" / last, "--save-dir", new)
        assert "lacks the best checkpoint" not in out
        assert load(new / "best.pth")["step"] == 2
        assert sum(entry["step"] <= 4 for entry in entries_of(new)) >= expected


def test_an_earlier_best_is_copied_to_another_folder(run_here, tmp_path):
    argv = [*RUN, "--max-steps", 8, "--eval-every-steps", 2, "--save-every-steps", 1, "--keep-checkpoints", 0]
    run_here(*argv, "--save-dir", tmp_path / "old")
    entries = entries_of(tmp_path / "old")
    best = [entry["step"] for entry in entries if entry["best"]]
    middle = next(entry for entry in entries if best[0] < entry["step"] < best[-1] and not entry["best"])
    source = tmp_path / "old" / middle["file"]
    out, _ = run_here(*argv, "--lr", 1e-30, "--resume-from", source, "--save-dir", tmp_path / "new")
    assert "lacks the best checkpoint" not in out
    copied = entries_of(tmp_path / "new")[0]
    assert copied["best"] and copied["step"] == max(step for step in best if step < middle["step"])


# --- before the first step ---------------------------------------------------------------------------------------


def test_the_start_is_the_best_if_training_makes_the_weights_worse(run_here, tmp_path):
    run_here(*RUN, "--epochs", 6, "--save-dir", tmp_path / "good")
    good = tmp_path / "good" / "best.pth"
    argv = [*RUN, "--init-from", good, "--lr", 300, "--weight-decay", 0, "--epochs", 2]
    run_here(*argv, "--save-dir", tmp_path / "plain")
    run_here(*argv, "--eval-start", "--save-dir", tmp_path / "start")
    assert_same_bits(*(load(tmp_path / name / "final.pth")["model"] for name in ("plain", "start")))
    assert steps_of(tmp_path / "start", "epoch") == [0, 5, 10]
    assert results_of(tmp_path / "start")["best"]["step"] == 0
    assert_same_bits(load(tmp_path / "start" / "best.pth")["model"], load(good)["model"])
    assert results_of(tmp_path / "start")["metrics"] == results_of(tmp_path / "good")["metrics"]


def test_a_run_resumes_after_the_evaluation_before_the_first_step(run_here, tmp_path):
    argv = [*RUN, "--lr", 0.1, "--epochs", 2, "--eval-start"]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    cut_back(tmp_path / "whole", entries_of(tmp_path / "whole")[:1], tmp_path / "again")
    run_here(*argv, "--save-dir", tmp_path / "again")
    assert_same_run(tmp_path / "whole", tmp_path / "again")
    assert [entry["step"] for entry in entries_of(tmp_path / "again")] == [0, 5, 10]


def test_a_start_that_scores_nan_is_scored_once(run_here, tmp_path, monkeypatch):
    class Unscored(Weighted):
        def summarise(self, sums):
            return super().summarise(sums) | {"accuracy": math.nan}

    monkeypatch.setitem(TASKS, "unscored", Unscored)
    argv = ["--task", "unscored", *RUN[2:], "--epochs", 1, "--eval-start"]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    cut_back(tmp_path / "whole", entries_of(tmp_path / "whole")[:1], tmp_path / "again")
    run_here(*argv, "--save-dir", tmp_path / "again")
    assert [entry["step"] for entry in entries_of(tmp_path / "again")] == [0, 5]
    assert steps_of(tmp_path / "again", "epoch") == [0, 5]


# --- minutes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def a_minute_per_step(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    advance = Progress.advance

    def advance_and_tick(progress, *step):
        advance(progress, *step)
        clock.now += 60

    monkeypatch.setattr(Progress, "advance", advance_and_tick)
    monkeypatch.setattr("trainer.loop.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_checkpoints_are_saved_by_the_clock(a_minute_per_step, run_here, tmp_path):
    """A request to save takes effect two steps later. Minutes count from the last save of any kind."""
    argv = [*RUN, "--max-steps", 19]
    run_here(*argv, "--save-dir", tmp_path / "plain")
    run_here(*argv, "--save-every-minutes", 3, "--save-dir", tmp_path / "saved")
    assert [entry["step"] for entry in entries_of(tmp_path / "plain")] == [5, 10, 15, 19]
    assert [entry["step"] for entry in entries_of(tmp_path / "saved")] == [5, 5, 10, 10, 15, 15, 19]
    run_here(*argv, "--save-every-minutes", 1, "--save-dir", tmp_path / "often")
    assert [entry["step"] for entry in entries_of(tmp_path / "often")] == [3, 5, 8, 10, 13, 15, 18, 19]
    for name in ("saved", "often"):
        assert_same_run(tmp_path / "plain", tmp_path / name)


def test_a_run_pauses_at_its_time_limit(a_minute_per_step, run_here, tmp_path):
    argv, run = [*RUN, "--max-steps", 12], tmp_path / "run"
    run_here(*argv, "--save-dir", tmp_path / "plain")

    def state():
        found = json.loads((run / "state.json").read_text())
        return found["state"], found["step"]

    used = "--max-minutes 3: time is up after 4 minutes and 4 optimizer steps of training; to continue, raise"
    out, _ = run_here(*argv, "--max-minutes", 3, "--save-dir", run)
    assert used in out and state() == ("paused", 4) and not (run / "results.json").exists()
    assert json.loads((run / "state.json").read_text())["message"].startswith(used)
    before = (run / "manifest.json").read_bytes()
    out, _ = run_here(*argv, "--max-minutes", 3, "--save-dir", run)
    assert out.startswith(used) and state() == ("paused", 4) and (run / "manifest.json").read_bytes() == before
    scores, _ = run_here(*argv, "--max-minutes", 3, "--save-dir", run, "--eval-only")
    assert "Evaluating the weights of optimizer step 4 in " in scores and "test/loss" in scores
    run_here(*argv, "--max-minutes", 6, "--save-dir", run)
    assert state() == ("paused", 7)
    run_here(*argv, "--save-dir", run)
    assert state() == ("finished", 12)
    assert_same_run(tmp_path / "plain", run)


def test_work_before_training_does_not_use_up_the_time_limit(a_minute_per_step, run_here, monkeypatch, tmp_path):
    """On GPUs, opening a run includes the dry run, at the first start and at each resume."""

    def open_slowly(*args):
        a_minute_per_step.now += 3600
        open_run(*args)

    monkeypatch.setattr("trainer.commands.train.open_run", open_slowly)
    argv = [*RUN, "--max-minutes", 10, "--save-every-minutes", 9, "--save-dir", tmp_path]
    for max_steps in (4, 7):
        run_here(*argv, "--max-steps", max_steps)
        assert load(tmp_path / "last.pth")["train_seconds"] == 60 * max_steps == results_of(tmp_path)["train_seconds"]
    assert [entry["step"] for entry in entries_of(tmp_path)] == [4, 5, 7]


def test_a_kill_does_not_extend_the_time_limit_and_the_end_is_scored(a_minute_per_step, run_here, tmp_path):
    argv = [*RUN, "--max-steps", 9, "--save-every-steps", 2, "--max-minutes"]
    run_here(*argv, 9, "--save-dir", tmp_path / "whole")
    assert results_of(tmp_path / "whole")["step"] == 9
    cut_back(tmp_path / "whole", [e for e in entries_of(tmp_path / "whole") if e["step"] <= 4], tmp_path / "killed")
    run_here(*argv, 7, "--save-dir", tmp_path / "killed")
    assert load(tmp_path / "killed" / "last.pth")["step"] == 8
