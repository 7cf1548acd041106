"""Tests what a task may set for its run (defaults, headline metrics, parameter groups), and when it is evaluated."""

import json
import textwrap
from typing import ClassVar

import numpy as np
import pytest
import torch

import trainer
from tasks import TASKS
from tests.conftest import WEIGHTED, assert_same_bits, cut_back, load, read_metrics
from tests.helpers.replicas import ReplicasOnCpu
from tests.helpers.weighted_task import Weighted
from trainer.cli import main
from trainer.commands.build import assemble_run, build_task
from trainer.commands.parse import parse
from trainer.common.errors import UserError
from trainer.loop.evaluate import evaluate, metrics_of
from trainer.parallel.strategy import SingleDevice
from trainer.task import Task

CPU = torch.device("cpu")
BETAS = (0.8, 0.97)


class Stating(Weighted):
    defaults: ClassVar = {
        "lr": 0.02, "batch_size": 16, "epochs": 5, "warmup_epochs": 1, "global_batch_size": 48, "amp": "bf16",
    }  # fmt: skip
    headline = ("loss", "hits@1")

    def param_groups(self, objective, phase):
        return [{**group, "betas": BETAS} for group in super().param_groups(objective, phase)]

    def summarise(self, sums):
        metrics = super().summarise(sums)
        return metrics | {"hits@1": metrics["accuracy"]}


@pytest.fixture
def stating(monkeypatch):
    monkeypatch.setitem(TASKS, "stating", Stating)


# --- defaults ----------------------------------------------------------------------------------------------------


def read(*argv, several_devices=False):
    flags, problems = parse(["--task", "stating", *argv], several_devices)
    assert problems == []
    return flags


def test_the_command_line_overrides_defaults_of_a_task(stating):
    flags = read("--epochs", "7")
    assert (flags.learning.lr, flags.batch.batch_size, flags.run.epochs) == (0.02, 16, 7)
    assert flags.learning.weight_decay == 0.01  # the default of the flag
    assert flags.values()["--lr"] == 0.02
    other, _ = parse([], several_devices=False)
    assert (other.learning.lr, other.batch.batch_size, other.run.epochs) == (1e-3, 32, 12)


def test_help_shows_the_defaults_of_the_task(stating, capsys):
    with pytest.raises(SystemExit):
        parse(["--task", "stating", "--help"], several_devices=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "learning rate after warm-up [0.02]" in shown
    assert "epochs of linear warm-up [1.0]" in shown


def test_a_switch_set_by_a_task_can_be_reset(monkeypatch, capsys):
    defaults = {"drop_last": True, "no_test": True}
    monkeypatch.setitem(TASKS, "stating", type("Switching", (Weighted,), {"defaults": defaults}))
    flags = read()
    assert (flags.batch.drop_last, flags.run.no_test) == (True, True)
    flags = read("--drop-last=false", "--no-test=false")
    assert (flags.batch.drop_last, flags.run.no_test) == (False, False)
    with pytest.raises(SystemExit):
        parse(["--task", "stating", "--help-all"], several_devices=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "of an epoch if it is incomplete (default: true)" in shown


def test_a_flag_displaces_the_default_that_it_excludes(stating):
    assert read().learning.warmup_epochs == 1
    assert read("--warmup_steps=3").learning.warmup_epochs is None
    assert read("--grad-accum-steps", "2").batch.global_batch_size is None
    assert read("--no-amp").precision.amp == "off"
    assert read("--no-amp=false").precision.amp == "bf16"


def test_another_optimizer_drops_the_tasks_settings(monkeypatch):
    defaults = {"optimizer": "sgd", "momentum": 0.9}
    monkeypatch.setitem(TASKS, "stating", type("Pushing", (Weighted,), {"defaults": defaults}))
    assert read("--lr", "0.1").learning.momentum == 0.9
    assert read("--optimizer", "adam").learning.momentum is None
    assert read("--optimizer", "adam").left_out == ["Left out: --momentum 0.9, which --optimizer adam does not use."]
    betas = type("Betas", (Weighted,), {"defaults": {"betas": (0.5, 0.99), "eps": 1e-6}})
    monkeypatch.setitem(TASKS, "stating", betas)
    for optimizer in ("adam", "adamw"):
        flags = read("--optimizer", optimizer)
        assert (flags.learning.betas, flags.learning.eps, flags.left_out) == ((0.5, 0.99), 1e-6, [])
    flags = read("--optimizer", "sgd", "--momentum", "0.5")
    assert (flags.learning.betas, flags.learning.momentum) == (None, 0.5)
    assert {line.split()[2] for line in flags.left_out} == {"--betas", "--eps"}
    _, problems = parse(["--task", "stating", "--optimizer", "sgd", "--betas", "0.5,0.9"], several_devices=False)
    assert problems and "does not use it" in problems[0]


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"learning_rate": 0.1}, "learning_rate is not a flag of the trainer"),
        ({"batchsize": 4}, "did you mean batch_size?"),
        ({"width": 4}, "width is not a flag of the trainer"),
        ({"deterministic": 1}, "--deterministic 1: must be true or false"),
        ({"lr": "0.1"}, "--lr 0.1: must be a number"),
        ({"task": "har"}, "must not contain 'task'"),
        ({"lr": -1}, "--lr -1: must be above 0"),
        ({"epochs": 2.5}, "--epochs 2.5: must be a whole number"),
        ({"amp": "half"}, "--amp half: must be one of"),
        ({"lr": None}, "--lr (none): must be a number"),
    ],
)
def test_invalid_defaults_are_the_tasks_error(defaults, message, monkeypatch):
    task = type("Wrong", (Weighted,), {"defaults": defaults})
    monkeypatch.setitem(TASKS, "wrong", task)
    with pytest.raises(UserError, match=r"Wrong\.defaults: ") as raised:
        parse(["--task", "wrong"], several_devices=False)
    assert message in str(raised.value)


def test_multi_device_defaults_are_accepted_on_one_device(monkeypatch):
    task = type("Slow", (Weighted,), {"defaults": {"dist_timeout_s": 30, "warmup_steps": None}})
    monkeypatch.setitem(TASKS, "slow", task)
    assert parse(["--task", "slow"], several_devices=False)[1] == []
    flags, _ = parse(["--task", "slow", "--multi-gpu", "ddp"], several_devices=True)
    assert flags.multi.dist_timeout_s == 30


# --- evaluation --------------------------------------------------------------------------------------------------


def assembled(strategy, *argv):
    flags, problems = parse(["--task", WEIGHTED, "--dtype", "float64", *argv], several_devices=False)
    assert problems == []
    return assemble_run(flags, build_task(flags), strategy)


def sizes_of_forwards(run):
    sizes = []
    run.learner.objective.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0]["weight"])))
    return sizes


def test_metrics_do_not_depend_on_the_evaluation_batch_size():
    expected = None
    for size in (1, 5, 17, 100):  # the validation set has 17 samples
        run = assembled(SingleDevice(CPU), "--batch-size", "3", "--eval-batch-size", str(size))
        sizes = sizes_of_forwards(run)
        metrics = metrics_of(run.task, run.group, {"val": evaluate(run, "val")})
        assert sizes == [min(size, 17 - start) for start in range(0, 17, size)]
        expected = expected or metrics
        assert metrics == pytest.approx(expected, rel=1e-12)


def test_the_evaluation_batch_size_defaults_to_training():
    """Training uses smaller batches here, because the global batch is smaller than the batch size."""
    run = assembled(SingleDevice(CPU), "--batch-size", "8", "--global-batch-size", "2")
    sizes = sizes_of_forwards(run)
    evaluate(run, "val")
    assert sizes == [8, 8, 1]


def test_the_evaluation_batch_size_is_per_device():
    run = assembled(ReplicasOnCpu(3), "--eval-batch-size", "5")
    sizes = sizes_of_forwards(run)
    evaluate(run, "val")
    assert sizes[:3] == [5, 5, 5]


# --- runs --------------------------------------------------------------------------------------------------------


def train(directory, *argv):
    arguments = ["--task", "stating", "--num-threads", "1", "--no-amp", "--save-dir", str(directory), *argv]
    assert main(arguments, several_devices=False) == 0


def test_resumes_from_any_checkpoint_and_validates_at_the_same_epochs(stating, tmp_path, signals_restored):
    """Three steps an epoch and a save every two give checkpoints in mid-epoch and at all kinds of ends of epochs."""
    argv = ["--eval-every", "2", "--save-every-steps", "2", "--keep-checkpoints", "0", "--log-interval", "2"]
    whole = tmp_path / "whole"
    train(whole, *argv)
    epochs = read_metrics(whole, "epoch")
    assert [record["epoch"] for record in epochs if "val/loss" in record] == [2, 4, 5]
    assert all("train/loss" in record for record in epochs)
    entries = json.loads((whole / "manifest.json").read_text())["checkpoints"]
    at_ends = [entry for entry in entries if entry["samples"] == 0]
    assert [entry["epoch"] for entry in at_ends if entry["value"] is not None] == [2, 4, 5]
    assert [entry["epoch"] for entry in at_ends] == [1, 2, 3, 4, 5]
    for i in range(1, len(entries)):
        again = tmp_path / str(i)
        cut_back(whole, entries[:i], again)
        train(again, *argv)
        for name in ("final.pth", "best.pth"):
            assert_same_bits(load(whole / name), load(again / name))
        for event in ("step", "epoch", "result"):
            assert read_metrics(again, event) == read_metrics(whole, event)


def test_settings_of_a_parameter_group_reach_the_optimizer_and_survive_a_resume(stating, tmp_path, signals_restored):
    train(tmp_path, "--epochs", "1")
    train(tmp_path, "--epochs", "2")
    for name in ("checkpoint_1.pth", "checkpoint_2.pth"):
        (optimizer,) = load(tmp_path / name)["optimizers"]["train"]
        groups = optimizer["param_groups"]
        assert [tuple(group["betas"]) for group in groups] == [BETAS] * 2


@pytest.mark.parametrize(("eval_every", "last"), [(1, 4), (2, 8), (4, 9)])
def test_patience_counts_evaluations(eval_every, last, stating, tmp_path, signals_restored):
    """With a learning rate near zero, the first validation remains the best."""
    argv = ["--lr", "1e-30", "--epochs", "9", "--eval-every", str(eval_every), "--early-stopping-patience", "3"]
    train(tmp_path, *argv)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["best"]["epoch"], results["epochs"]) == (eval_every, last)


def test_the_console_shows_headline_metrics_and_files_show_all(stating, tmp_path, capsys, signals_restored):
    train(tmp_path, "--epochs", "3", "--eval-every", "2")
    printed = capsys.readouterr().out.splitlines()
    table = (tmp_path / "val.log").read_text().splitlines()
    assert [line for line in printed if line in table] == table
    headers = [line.split() for line in table if line.startswith("epoch")]
    speed = ["samples_per_second", "epoch_seconds"]
    assert headers == [
        ["epoch", "train/loss", "train/hits@1", *speed],
        ["epoch", "train/loss", "train/hits@1", "val/loss", "val/hits@1", *speed],
    ]
    assert table[-1].startswith("Finished, with the best weights: test/loss ")
    assert table[-1].endswith(", and 2 more in results.json")
    assert "accuracy" not in "".join(table)
    results = json.loads((tmp_path / "results.json").read_text())
    everything = {"test/loss", "test/accuracy", "test/num_samples", "test/hits@1"}
    assert results["metrics"].keys() == everything
    assert read_metrics(tmp_path, "result")[0].keys() >= everything
    assert read_metrics(tmp_path, "epoch")[1].keys() >= {"val/accuracy", "val/hits@1"}


def test_the_example_of_the_contract_trains(run_here, tmp_path):
    _, _, example = Task.__doc__.partition("--num-points 500`:\n")
    (tmp_path / "sides.py").write_text(textwrap.dedent(example))
    argv = ("--task", f"{tmp_path / 'sides.py'}:Sides", "--num-points", 500, "--epochs", 6, "--lr", 0.1)
    run_here(*argv, "--save-dir", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]["test/accuracy"] > 0.9


def test_one_import_provides_all_that_a_task_needs():
    assert {name: getattr(trainer, name) for name in trainer.__all__}.keys() == set(trainer.__all__)
    assert trainer.Task is Task
    with pytest.raises(AttributeError, match="no attribute 'Tsk'"):
        trainer.Tsk  # noqa: B018


def test_weights_of_a_data_set_equal_those_of_its_samples():
    keys = trainer.SampleKeys(np.arange(3), 0)
    weight = np.array([2, 0, 1], np.float32)
    assert Task.collate(None, {"weight": weight}, keys)["weight"].tolist() == [2, 0, 1]
    assert Task.collate(None, {"point": weight}, keys)["weight"].tolist() == [1, 1, 1]
