"""Run directories in which one value was changed, often with a matching sha256, resume or are refused.

A value of a wrong type or outside its range is reported and not used. Another change cannot be detected if the sha256
matches, but must not cause a traceback.
"""

import copy
import json
import os
import random
import shutil

import pytest
import torch

from tests.conftest import WEIGHTED, cut_back, load
from tests.faults.lives import FIRST_SEED
from tests.faults.mutations import changed
from tests.faults.test_corruption import copy_run
from trainer.checkpoint.file import size_and_sum
from trainer.checkpoint.format import schema_error_of_checkpoint
from trainer.checkpoint.manifest import schema_error_of_manifest
from trainer.cli import main
from trainer.parallel.environment import torchrun_agent

ARGV = [
    "--task", WEIGHTED, "--num-train", "24", "--num-val", "2", "--num-test", "1", "--width", "2", "--batch-size", "12",
    "--num-threads", "1", "--keep-checkpoints", "0", "--lr", "0.01", "--device", "cpu", "--epochs", "3",
    "--ema-decay", "0.9", "--dtype", "float64",
]  # fmt: skip
NEWEST = 2
"""Epoch of the newest checkpoint."""


@pytest.fixture
def run_in(capsys, monkeypatch, tmp_path, signals_restored, no_rank_variables):
    """Returns a function that runs the command in a directory: (status, standard output, lines of standard error)."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # makes the program use config.json without checkpoints
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # saves time; no test here loses power

    def run(directory, *more):
        capsys.readouterr()
        status = main([*ARGV, "--save-dir", str(directory), *map(str, more)], several_devices=False)
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


@pytest.fixture
def originals(run_in, tmp_path):
    """Returns run directories as if killed after two epochs or before the first checkpoint, and the final weights."""
    whole, killed, begun = tmp_path / "whole", tmp_path / "killed", tmp_path / "begun"
    assert run_in(whole)[0] == 0
    entries = json.loads((whole / "manifest.json").read_text())["checkpoints"]
    cut_back(whole, entries[:NEWEST], killed)
    begun.mkdir()
    for directory in (killed, begun):
        for name in ("config.json", "state.json"):
            shutil.copy(whole / name, directory)
        limit = {"device": "cpu", "asked_batch_size": 12, "asked_eval_batch_size": None, "batch_size": 6}
        (directory / "memory.json").write_text(json.dumps(limit | {"eval_batch_size": None}))
    # The manifest of the killed run must not list later checkpoints.
    rewrite_manifest(killed, lambda kept: kept[:NEWEST])
    assert json.loads((begun / "config.json").read_text())["torchrun_agents"] == [torchrun_agent()]
    return {"killed": killed, "begun": begun}, load(whole / "final.pth")["model"]


def rewrite_manifest(directory, change):
    file = directory / "manifest.json"
    file.write_text(json.dumps({"checkpoints": change(json.loads(file.read_text())["checkpoints"])}))


def mutate(draw, directory, what):
    """Changes one value of a run directory; returns a description of the change."""
    if what.endswith(".json"):
        file = directory / what
        content, done = changed(draw, json.loads(file.read_text()))
        try:
            file.write_text(json.dumps(content))
        except ValueError:  # an integer that Python does not print
            file.write_text("{")
        return done
    file = directory / f"checkpoint_{NEWEST}.pth"
    state, done = changed(draw, torch.load(file, weights_only=True))
    file.unlink()
    torch.save(state, file)
    if what == "without manifest":
        (directory / "manifest.json").unlink()
    if what == "in manifest":
        rewrite_manifest(directory, lambda kept: [e | size_and_sum(directory / e["file"]) for e in kept])
    return done


TOLD = ("is damaged", "contains weights, but not", "is not a checkpoint")
TARGETS = ("in manifest", "without manifest", "named", "manifest.json", "config.json", "state.json", "memory.json")


def outcome_of(seed, originals, run_in, folder):
    """Resumes a run with one changed value; returns "refused", "told" if the run reports the change, or "unsaid"."""
    draw = random.Random(seed)
    directories, expected = originals
    what = TARGETS[seed % len(TARGETS)]
    begun = what == "config.json" and draw.random() < 0.7
    broken = folder / f"seed{seed}"
    copy_run(directories["begun" if begun else "killed"], broken)
    done = f"seed {seed}: {what}: {mutate(draw, broken, what)}"
    newest = broken / f"checkpoint_{NEWEST}.pth"
    more = ["--resume-from", newest] if what == "named" else []
    try:
        status, out, err = run_in(folder / f"seed{seed}-named" if more else broken, *more)
    except Exception as error:
        raise AssertionError(done) from error
    outcome = "refused" if status == 2 else "told" if any(words in out for words in TOLD) else "unsaid"
    if outcome == "refused":
        assert len(err) == 1 and err[0].startswith("error: "), (done, err)
    elif outcome == "told":
        assert (status, err) == (0, []), (done, err)
        weights = load((folder / f"seed{seed}-named" if more else broken) / "final.pth")["model"]
        for name, weight in weights.items():  # smaller micro-batches round differently
            assert torch.allclose(weight, expected[name], rtol=1e-9, atol=1e-12), done
    else:
        assert status == 0, (done, err)
    shutil.rmtree(broken)
    shutil.rmtree(folder / f"seed{seed}-named", ignore_errors=True)
    return outcome


def test_unchanged_runs_resume(originals, run_in, tmp_path):
    for name, directory in originals[0].items():
        copy_run(directory, tmp_path / name / "copy")
        status, out, err = run_in(tmp_path / name / "copy")
        assert (status, err) == (0, [])
        assert "is damaged" not in out
        assert "At most 6 samples per forward pass, because" in out
        assert ("Resuming after optimizer step 4" in out) == (name == "killed")


def test_44_changed_values_are_refused_or_harmless(originals, run_in, tmp_path):
    outcomes = [outcome_of(seed, originals, run_in, tmp_path) for seed in range(FIRST_SEED, FIRST_SEED + 44)]
    assert {"refused", "told", "unsaid"} == set(outcomes)


@pytest.mark.slow
def test_2002_changed_values_are_refused_or_harmless(originals, run_in, tmp_path, capsys):
    seeds = range(FIRST_SEED, FIRST_SEED + 2002)
    outcomes = [outcome_of(seed, originals, run_in, tmp_path) for seed in seeds]
    with capsys.disabled():
        counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        print(f"\nseeds {seeds[0]} to {seeds[-1]}: {counts}")


# --- kinds and ranges --------------------------------------------------------------------------------------------


@pytest.fixture
def state(originals):
    return load(originals[0]["killed"] / f"checkpoint_{NEWEST}.pth")


NAMED = [
    ("position.samples", 10**18, f"position.samples {10**18}: must be a whole number, from 0 to 24"),
    ("position.others", ((0, 0),), "position.others [0]: must have 0 pairs, one for each other phase"),
    ("position.phase", 1, "position.phase 1: must be below 1, the number of phases"),
    ("step", -5, "step -5: must be a whole number, at least 0"),
    ("step", 10**400, "step 1000"),
    ("best.value", "0.5", "best.value '0.5': must be a number"),
    ("config", None, "config None: must be a mapping"),
    ("config.--epochs", "3", "config.--epochs '3': must be a whole number"),
    ("lr_factor", float("nan"), "lr_factor nan: must be a finite number, above 0"),
    ("environment.num_devices", 0, "environment.num_devices 0: must be a whole number, at least 1"),
    ("global_batch_sizes", [12, 12], "global_batch_sizes [12, 12]: must have 1 values, one for each phase"),
    ("optimizers.train", [{}], "optimizers.train[0].param_groups is missing"),
    ("optimizers.train", 3, "optimizers.train 3: must be a list"),
    ("reported.train", [1.0], "reported.train [1.0]: must be a list of 2 values"),
    ("totals.train", {"loss": 1.0}, "totals.train.loss 1.0: must be a tensor"),
    ("train_seconds", float("inf"), "train_seconds inf: must be a finite number, at least 0"),
    ("code", {"commit": 3}, "code.changed is missing"),
]


def test_each_changed_entry_is_named(state):
    assert schema_error_of_checkpoint(state, resumable=True) is None
    for path, value, schema_error in NAMED:
        other = node = copy.deepcopy(state)
        *parents, last = path.split(".")
        for parent in parents:
            node = node[parent]
        node[last] = value
        assert schema_error in (schema_error_of_checkpoint(other, resumable=True) or ""), path


def test_an_optimizer_must_number_its_parameters_and_states_alike(state):
    (own,) = state["optimizers"]["train"]
    own["state"][0] |= {"step": -1, "last": float("nan"), "best": torch.tensor(float("nan"))}  # these mean "not yet"
    assert schema_error_of_checkpoint(state, resumable=True) is None
    own["state"][2] = {}
    own["state"][40] = {}
    assert "optimizers.train[0].state.40: is not one of the" in schema_error_of_checkpoint(state, resumable=True)
    own["param_groups"][0]["params"].reverse()
    assert "must number its parameters from 0" in schema_error_of_checkpoint(state, resumable=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda moment: moment[:1],
            "optimizers.train.state.0.exp_avg of the checkpoint has shape (1, 6), unlike its parameter",
        ),
        (None, "optimizers.train of the checkpoint has different entries for parameters of the same group"),
    ],
    ids=["in another shape", "missing of one parameter"],
)
def test_optimizer_states_that_would_fail_in_the_first_step_are_refused(change, told, state, run_in, tmp_path):
    (own,) = state["optimizers"]["train"]
    moment = own["state"][0].pop("exp_avg")
    if change is not None:
        own["state"][0]["exp_avg"] = change(moment)
    torch.save(state, tmp_path / "other.pth")
    status, _, err = run_in(tmp_path / "new", "--resume-from", tmp_path / "other.pth")
    assert status == 2
    assert len(err) == 1 and told in err[0]


@pytest.mark.parametrize("num", [100, pytest.param(4000, marks=pytest.mark.slow)])
def test_checks_of_changed_values_raise_nothing(num, state):
    found = 0
    for seed in range(FIRST_SEED, FIRST_SEED + num):
        other, done = changed(random.Random(seed), state)
        try:
            found += schema_error_of_checkpoint(other, resumable=True) is not None
        except Exception as error:
            raise AssertionError(f"seed {seed}: {done}") from error
    assert found > num / 2


def test_a_changed_entry_of_the_manifest_is_named(originals):
    text = (originals[0]["killed"] / "manifest.json").read_text()
    assert schema_error_of_manifest(json.loads(text)) is None
    for entry in ({"step": -1}, {"best": 1}, {"value": "high"}, {"sha256": "x"}, {"more": 1}):
        content = json.loads(text)
        content["checkpoints"][1] |= entry
        assert f"checkpoints[1].{next(iter(entry))}" in schema_error_of_manifest(content)
