"""Faults that are rarer than a kill, such as segmentation faults and disk errors, are reported and lose nothing."""

import os
import re
import signal
from dataclasses import replace
from errno import EIO
from functools import partial

import pytest

from tests.faults.disk import kill_points
from tests.faults.faulty_group import FAULTY, PROCESS, TRACEBACK, assert_one_message, assert_started_again
from tests.faults.lives import Life, Recipe, assert_as_unbroken
from tests.faults.prepared import Prepared
from tests.faults.watched import RECIPE, named_points

slow = pytest.mark.slow
ALONE = Recipe(
    argv=(
        "--task", FAULTY, "--num-train", 48, "--num-val", 5, "--width", 4, "--global-batch-size", 8, "--epochs", 3,
        "--num-threads", 1, "--save-every-steps", 2, "--log-interval", 1, "--lr", 0.01, "--ema-decay", 0.9,
        "--dropout", 0.1,
    ),
    global_batch_size=8,
    num_samples=48,
    epochs=3,
)  # fmt: skip
IN_GROUP = replace(ALONE, argv=(*ALONE.argv, "--dist-timeout-s", 3))


def errors_of(output):
    return [line for line in output.splitlines() if line.startswith("error: ")]


# --- on one of several ranks -------------------------------------------------------------------------------------


@pytest.fixture
def befallen(forked, environment, unbroken, tmp_path):
    """Returns a function that runs two ranks with a fault, then resumes: (output, statuses) of the faulty attempt.

    The resumed run must end with the same bits as an uninterrupted run.
    """

    def run(fault, *more, **variables):
        recipe = replace(IN_GROUP, argv=(*IN_GROUP.argv, *more))
        life = Life(tmp_path / "run", recipe)
        faulty = environment | variables | {"LOCKSTEP_FAULT": fault}
        job = life.attempt(partial(forked, environment=faulty), 2)
        ended = job.output, life.statuses
        life.attempt(forked, 2)
        assert life.statuses == [0, 0]
        assert_as_unbroken(life, unbroken(recipe, 2), same_bits=True)
        return ended

    return run


@pytest.fixture
def pipe(tmp_path):
    """Returns a named pipe; opening it blocks until the test ends."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR))


@slow
def test_a_segmentation_fault_is_reported_with_its_location(faulty_run):
    run = faulty_run("segfault forward 1")
    gone = rf"rank 1 of 2 is gone \({PROCESS}\), last seen \d+ s ago in .+"
    assert_one_message(run, f"{gone}; the same command resumes from the last checkpoint")
    assert_started_again(run)
    assert "Fatal Python error: Segmentation fault" in run.out
    assert re.search(r'File ".*faulty_task.py", line \d+ in segfault$', run.out, re.MULTILINE)


@slow
def test_a_segmentation_fault_loses_no_saved_step(befallen):
    output, (_, status) = befallen("segfault forward 1")
    assert status == -signal.SIGSEGV
    assert len(errors_of(output)) == 1


@slow
@pytest.mark.parametrize("fault", ["hold", "backtrack", "kernel"])
def test_a_stuck_interpreter_is_named_and_exits(fault, befallen, pipe):
    """The stuck process prints its stack when the other rank ends it."""
    output, statuses = befallen(f"{fault} forward 1", "--delay-s", 0.3, LOCKSTEP_PIPE=str(pipe))
    (error,) = errors_of(output)
    assert re.match(rf"error: rank 1 of 2 does not respond \({PROCESS}\), last seen \d+ s ago in .+", error)
    assert statuses == [75, -signal.SIGABRT]
    assert "Fatal Python error: Aborted" in output
    assert re.search(r'File ".*faulty_task.py", line \d+ in at$', output, re.MULTILINE)


@slow
def test_an_error_of_a_gpu_is_reported_once(befallen):
    output, statuses = befallen("gpu forward 1")
    message = "AcceleratorError: CUDA error: device-side assert triggered"
    assert errors_of(output) == [f"error: rank 1 of 2 failed in forward at optimizer step 3: {message}"]
    assert output.count(TRACEBACK) == 1
    assert statuses == [1, 1]


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_evaluation_is_reported(rank, befallen):
    output, statuses = befallen(f"kill evaluation {rank}")
    assert statuses[rank] == -signal.SIGKILL
    assert f"rank {rank} of 2 is gone" in output


# --- the disk ----------------------------------------------------------------------------------------------------


def assert_survives_failure(base, point, forked, unbroken):
    """Makes a file operation fail with EIO: the run must finish, or resume after a refusal with one message."""
    life = Life(base / "run", RECIPE)
    life.directory.mkdir(parents=True)
    failing = Prepared(watched=life.directory, kill_at=point._replace(error=EIO))
    job = life.attempt(partial(forked, prepare=failing), 1)
    output = f"{point}\n{job.output}"
    assert TRACEBACK not in output, output
    if life.statuses != [0]:
        assert life.statuses == [2], output
        (error,) = errors_of(output)
        assert "Input/output error" in error, output
        life.attempt(forked, 1)
        assert life.statuses == [0], point
    assert_as_unbroken(life, unbroken(RECIPE, 1), same_bits=True)


def test_a_run_survives_a_disk_error_during_a_save(forked, fresh, unbroken, tmp_path):
    assert_survives_failure(tmp_path, named_points(fresh.operations)["half-way through it"], forked, unbroken)


@slow
def test_a_run_survives_a_disk_error_in_any_operation(forked, fresh, unbroken, tmp_path):
    # "saved" marks the end of a save, and is no file operation.
    points = [point for point in kill_points(fresh.operations) if point.kind != "saved"]
    for number, point in enumerate(points):
        assert_survives_failure(tmp_path / str(number), point, forked, unbroken)
    print(f"{len(points)} operations failed")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=slow)])
def test_a_run_whose_directory_is_removed_ends_with_one_message(world_size, forked, environment, tmp_path):
    life = Life(tmp_path / "run", IN_GROUP if world_size > 1 else ALONE)
    gone = environment | {"LOCKSTEP_FAULT": "unlink forward 0", "LOCKSTEP_REMOVED": str(life.directory)}
    job = life.attempt(partial(forked, environment=gone), world_size)
    # TensorBoard's thread may print its own traceback, even in the middle of the message's line.
    (error,) = re.findall("error: .+", job.output)
    assert re.fullmatch(f"error: --save-dir {life.directory}: cannot write .+: the folder was deleted or .+", error)
    assert job.output.count(TRACEBACK) == job.output.count("Exception in thread")
    assert life.statuses == [2] * world_size
    assert not life.directory.exists()


def test_a_surviving_rank_does_not_recreate_a_removed_directory(forked, environment, tmp_path):
    """The new directory would lack most files of the run, which somebody may have moved."""
    life = Life(tmp_path / "run", IN_GROUP)
    gone = environment | {"LOCKSTEP_FAULT": "abandon forward 0", "LOCKSTEP_REMOVED": str(life.directory)}
    job = life.attempt(partial(forked, environment=gone), 2)
    assert f"could not be saved: --save-dir {life.directory}: the folder was deleted or moved; " in job.output
    assert not life.directory.exists() and job.output.count(TRACEBACK) == job.output.count("Exception in thread")


# --- the clock ---------------------------------------------------------------------------------------------------


def test_a_clock_that_runs_backwards_changes_nothing(forked, environment, unbroken, tmp_path):
    life = Life(tmp_path / "run", ALONE)
    job = life.attempt(partial(forked, environment=environment | {"LOCKSTEP_FAULT": "clock forward 0"}), 1)
    assert life.statuses == [0], job.output
    assert_as_unbroken(life, unbroken(ALONE, 1), same_bits=True)
    assert "-" not in "".join(re.findall(r"[^ ]+ samples/s", job.output))
