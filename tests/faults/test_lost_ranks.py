"""The loss of a rank repeats at most one optimizer step, and does not change how the run ends."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT, assert_same_bits, largest_difference, launcher, load, read_metrics
from tests.faults.job import Forks
from tests.faults.lives import Life, Recipe, assert_as_unbroken
from tests.faults.samples import resumed_step, whole_lines
from tests.helpers.processes import NO_GPU

TASK = ROOT / "tests" / "helpers" / "struck_task.py"
WORLD_SIZE = 3
STEPS_PER_EPOCH = 6
# The run saves only at the end of an epoch.
IN_DOUBLE = Recipe(
    argv=(
        "--task", f"{TASK}:Struck", "--dtype", "float64", "--num-train", 12 * STEPS_PER_EPOCH, "--epochs", 3,
        "--batch-size", 2, "--global-batch-size", 12, "--ema-decay", 0.9, "--lr", 0.01, "--num-threads", 1,
        "--log-interval", 4, "--eval-batch-size", 3,
    ),
    global_batch_size=12,
    num_samples=12 * STEPS_PER_EPOCH,
    epochs=3,
)  # fmt: skip
IN_SINGLE = ("--task", f"{TASK}:StruckNormed", "--dtype", "float32", "--dropout", 0.2, "--dist-timeout-s", 2)
STRUCK = replace(IN_DOUBLE, argv=(*IN_DOUBLE.argv, *IN_SINGLE))

# The rank is struck at optimizer step 10 or at the end of the second epoch. A step has two forward passes and two
# messages; two more messages belong to a placeholder batch.
TIMES = {"forward": 20, "backward": 20, "exchange": 22, "optimizer": 10, "evaluation": 4, "save": 2, "write": 2}
HOWS, PLACES = ("kill", "stop", "raise"), tuple(TIMES)[:-1]
CASES = [*itertools.product(HOWS, PLACES, range(WORLD_SIZE)), ("kill", "write", 0)]
QUICK = [("kill", "exchange", 0), ("raise", "optimizer", 0)]


def struck(environment, folder, how="kill", place="forward", rank=0):
    """Returns the environment of a run whose rank is struck or, if `folder` is None, in which nothing happens."""
    number = TIMES[place] if folder is not None else 10**6
    note = (folder or Path("/nonexistent")) / "note"
    return environment | {"LOCKSTEP_STRIKE": f"{how} {place} {rank} {number}", "LOCKSTEP_STRIKE_NOTE": str(note)}


@pytest.fixture(scope="session")
def lives(tmp_path_factory, environment):
    """Returns a function that trains each recipe once without interruption, and returns its `Life`."""
    known = {}

    def live(recipe):
        if recipe not in known:
            life = Life(tmp_path_factory.mktemp("undisturbed") / "run", recipe)
            life.attempt(partial(Forks, environment=struck(environment, None)), WORLD_SIZE)
            assert life.statuses == [0] * WORLD_SIZE
            known[recipe] = life
        return known[recipe]

    return live


def steps_begun(files, world_size) -> int:
    """Returns the number of steps that at least one rank of an attempt has begun."""
    forwards_per_step = 12 // (2 * world_size)
    return -(-max(len(whole_lines(file)) - 1 for file in files) // forwards_per_step)


def broken_life(base, recipe, environment, case, worlds):
    """Returns the life of a run that was struck once and then resumed to its end."""
    life = Life(base / "run", recipe)
    start = partial(Forks, environment=struck(environment, base, *case))
    life.attempt(start, worlds[0])
    assert (base / "note").exists()
    assert all(life.statuses), life.statuses
    job = life.attempt(start, worlds[1])
    assert set(life.statuses) == {0}, job.output
    return life


def assert_one_step_lost(life: Life, world_size: int = WORLD_SIZE) -> None:
    first, second = life.parts
    begun = first.first_step + steps_begun((life.directory.parent / "attempt0").glob("*.jsonl"), world_size)
    assert second.first_step >= begun - 1, f"{begun - second.first_step} steps are computed twice"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES], ids=str
)
def test_a_lost_rank_costs_one_step(case, lives, environment, tmp_path):
    life = broken_life(tmp_path, STRUCK, environment, case, [WORLD_SIZE, WORLD_SIZE])
    # If rank 0 dies while it writes new best weights, the run resumes from the previous checkpoint.
    if case != ("kill", "write", 0):
        assert_one_step_lost(life)
    assert_as_unbroken(life, lives(STRUCK), same_bits=True)


def restarting_torchrun(world_size):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}", "--max-restarts=2",
            "main_multi_gpu.py", "--multi-gpu", "ddp"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("start", [launcher, restarting_torchrun])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("place", "rank"), [(place, i % WORLD_SIZE) for i, place in enumerate(PLACES)])
def test_a_launcher_restarts_the_run(start, how, place, rank, lives, environment, tmp_path):
    """The program's own launcher does not restart after an exception, because its cause may recur."""
    records, output = tmp_path / "records", tmp_path / "output"
    records.mkdir()
    variables = struck(environment, tmp_path, how, place, rank) | NO_GPU | {"LOCKSTEP_RECORD": str(records)}
    command = [sys.executable, *start(WORLD_SIZE), *STRUCK.argv, "--save-dir", tmp_path / "run"]
    with output.open("w") as file:
        give = partial(subprocess.run, [*map(str, command)], cwd=ROOT, env=variables, stdout=file, stderr=file)
        status = give(timeout=300).returncode
        if how == "raise" and start is launcher:
            assert status == 1
            status = give(timeout=300).returncode
    assert status == 0, output.read_text()
    died = float((tmp_path / "note").read_text())
    before = [file for file in records.glob("*.jsonl") if json.loads(whole_lines(file)[0])["time"] < died]
    assert resumed_step(output.read_text()) >= steps_begun(before, WORLD_SIZE) - 1
    for name in ("final.pth", "best.pth"):
        assert_same_bits(load(lives(STRUCK).directory / name), load(tmp_path / "run" / name))


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [[3, 2], [3, 1], [2, 3]], ids=str)
def test_a_lost_rank_costs_one_step_in_another_world(worlds, lives, environment, tmp_path):
    life = broken_life(tmp_path, IN_DOUBLE, environment, ("kill", "forward", 0), worlds)
    assert_one_step_lost(life, worlds[0])
    expected = lives(IN_DOUBLE)
    assert_as_unbroken(life, expected, same_bits=False)
    assert largest_difference(load(expected.directory / "final.pth"), load(life.directory / "final.pth")) < 1e-9


def test_metrics_say_how_many_samples_they_cover(environment, tmp_path):
    """In the second epoch, the rank that saved the state counted only its own third of the samples until then."""
    life = broken_life(tmp_path, STRUCK, environment, ("kill", "exchange", 0), [WORLD_SIZE, WORLD_SIZE])
    records = read_metrics(life.directory, "epoch")
    covered = [record.get("train/covered_samples") for record in records]
    assert covered[0] is None and covered[2] is None
    step = life.parts[1].first_step
    own = (step - STEPS_PER_EPOCH) * 4
    assert covered[1] == own + (2 * STEPS_PER_EPOCH - step) * 12
    assert records[1]["train/num_samples"] == covered[1]


@pytest.mark.slow
def test_sharded_parameters_resume_from_the_last_checkpoint(environment, tmp_path):
    life = Life(tmp_path / "run", IN_DOUBLE)
    start = partial(Forks, environment=struck(environment, tmp_path), form="fsdp")
    job = life.attempt(start, WORLD_SIZE)
    assert life.statuses == [-9, 1, 1], job.output
    assert "is saved" not in job.output
    life.attempt(start, WORLD_SIZE)
    assert (life.statuses, life.parts[1].first_step) == ([0] * WORLD_SIZE, STEPS_PER_EPOCH)


def test_lost_shards_of_parameters_are_reported(environment, tmp_path):
    life = Life(tmp_path / "run", IN_DOUBLE)
    job = life.attempt(partial(Forks, environment=struck(environment, tmp_path, rank=1), form="fsdp"), WORLD_SIZE)
    assert life.statuses == [75, -9, 1], job.output
    said = "The newest checkpoint is from optimizer step 6; later steps could not be saved, because no process has all"
    assert said in job.output


def test_state_json_names_the_lost_rank(environment, tmp_path):
    """Rank 0 is lost, so another rank must write the message."""
    life = Life(tmp_path / "run", STRUCK)
    job = life.attempt(partial(Forks, environment=struck(environment, tmp_path, "kill", "forward", 0)), WORLD_SIZE)
    assert life.statuses == [-9, 75, 75], job.output
    state = json.loads((life.directory / "state.json").read_text())
    assert state["state"] == "failed"
    assert state["message"].startswith("rank 0 of 3 is gone (process ")
