"""Tests docs/comparison.md: its commands parse, its scripts detect differences, and Lockstep's side of them runs."""

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest

from benchmarks.peers.resuming import lineage
from benchmarks.peers.sides import Run, distance, lockstep_arguments, same_bits, watched
from benchmarks.peers.tagging import Settings, loss_of, new_model, new_optimizer, scores_of, train_data, trained_on
from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks" / "peers"
PAGE = (ROOT / "docs" / "comparison.md").read_text()
SMALL = Settings(num_train=43, num_eval=11, epochs=2, micro_batch=4, accumulate=3, save_every=1)


# --- the page --------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    found = re.findall(r"^python benchmarks/peers/(\w+)\.py(.*)$", PAGE, re.MULTILINE)
    return [(script, shlex.split(arguments, comments=True)) for script, arguments in found]


def test_page_shows_every_command():
    assert {script for script, _ in commands()} == {"exactness", "resuming", "cost"}


@pytest.mark.parametrize(("script", "arguments"), commands())
def test_command_of_the_page_parses(script, arguments):
    import_module(f"benchmarks.peers.{script}").parser().parse_args(arguments)


@pytest.mark.parametrize("side", ["lightning", "accelerate"])
def test_scripts_of_compared_trainers_exist(side):
    tree = ast.parse((FOLDER / f"{side}_side.py").read_text())
    assert "main" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_page_states_the_versions_that_are_required():
    for line in (FOLDER / "requirements.txt").read_text().splitlines():
        name, version = line.partition(" #")[0].split("==")
        assert re.search(rf"{name} {re.escape(version.strip())}\b", PAGE, re.IGNORECASE), line


# --- Lockstep's side -------------------------------------------------------------------------------------------------


@pytest.fixture
def start(command, tmp_path):
    """Starts or resumes a run in a process that takes notes; returns the run."""

    def start(settings=SMALL, status=0, name="run", **asked):
        run = Run("lockstep", settings, tmp_path / name)
        notes = run.notes / f"{len(list(run.notes.glob('*'))):03}"
        notes.mkdir(parents=True)
        arguments = [*lockstep_arguments(settings), "--save-dir", run.save_dir]
        command(*arguments, status=status, **watched(notes, **asked))
        return run

    return start


def test_steps_equal_whole_batches(start):
    settings = replace(SMALL, epochs=1)
    run = start(settings)
    (steps,) = run.lives()
    assert sorted(i for step in steps for i in step.index) == list(range(settings.num_train))
    right = trained_on(settings, [step.index for step in steps]).state_dict()
    assert distance(run.weights(), right, new_model(settings).state_dict()) < 1e-12
    assert run.metrics() == pytest.approx(scores_of(settings, run.weights()), rel=1e-12)


def test_a_run_killed_within_an_epoch_resumes(start):
    unbroken = start(name="unbroken")
    start(status=-9, die_at=20)
    run = start()
    went_on_after, steps = lineage(*run.lives())
    assert went_on_after is not None and 4 < went_on_after < 8
    assert [(s.weights, s.index) for s in steps] == [(s.weights, s.index) for s in unbroken.lives()[0]]
    assert same_bits(run.weights(), unbroken.weights())


def test_a_mean_of_means_is_detected():
    data, model = train_data(SMALL), new_model(SMALL)
    optimizer = new_optimizer(SMALL, model.parameters())
    for i in (range(4), range(4, 8), range(8, 11)):
        batch = data.__getitems__(i)
        (loss_of(model(batch["tokens"]), batch["tags"]) / 3).backward()
    optimizer.step()
    right = trained_on(SMALL, [range(11)]).state_dict()
    assert distance(model.state_dict(), right, new_model(SMALL).state_dict()) > 0.01


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("side", ["lockstep", "lightning", "accelerate"])
@pytest.mark.parametrize(
    "script", ["exactness.py", "resuming.py stop", "resuming.py worlds", "resuming.py kills --kills 3", "cost.py"]
)
def test_the_comparison_runs(script, side):
    if side != "lockstep" and find_spec(side) is None:
        pytest.skip(f"{side} is not installed: pip install -r benchmarks/peers/requirements.txt")
    name, *arguments = script.split()
    arguments += ["--rounds", "1", "--sides", side] if name == "cost.py" else [side]
    done = subprocess.run([sys.executable, FOLDER / name, *arguments], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines
    for line in lines if side == "lockstep" else []:
        assert line.get("weights_off", 0) < 1e-12
        assert line.get("num_eval") == line.get("scored")
        assert line.get("steps_with_other_samples", 0) == 0
        if name == "resuming.py" and "kills" in line:
            assert line["same_bits"] == line["kills"]
