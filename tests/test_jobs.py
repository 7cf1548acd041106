"""Common training jobs equal a bare loop, on 1 and 2 processes, in micro-batches, and when resumed.

tests/loop/test_joint.py tests SimCLR, CLIP and other losses of all rows.
"""

import functools

import pytest

from tests.conftest import ROOT, assert_same_bits, cut_back_to, load
from tests.helpers.forks import folder_of_world, main_of_rank
from tests.helpers.jobs import GLOBAL_BATCH, JOBS
from tests.helpers.weights import difference

FILE = ROOT / "tests" / "helpers" / "jobs.py"
NUM_STEPS, STOPPED_AT = 10, 6
"""An epoch of most jobs has four steps, the last one of two samples."""


def run_all(environment, folder):
    """Runs every job in one process of a world, and resumes each from the middle of its second epoch."""
    for name in JOBS:
        if run_once(environment, name, folder / name):
            return 1
        if environment.rank == 0:
            cut_back_to(folder / name, STOPPED_AT, folder / f"{name}-again")
        if run_once(environment, name, folder / f"{name}-again"):
            return 1
    return 0


def run_once(environment, name, place):
    size = GLOBAL_BATCH // 2 - (environment.world_size == 2)  # two micro-batches in each process
    argv = [
        "--task", f"{FILE}:{name}", "--max-steps", NUM_STEPS, "--global-batch-size", GLOBAL_BATCH, "--batch-size", size,
        "--device", "cpu", "--num-threads", 1, "--save-every-steps", STOPPED_AT, "--keep-checkpoints", 0,
    ]  # fmt: skip
    return main_of_rank(environment, argv, place)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Trains all jobs on a number of processes, once; returns the folder of their runs."""

    @functools.cache
    def of_size(world_size):
        return folder_of_world(run_all, world_size, tmp_path_factory.mktemp("world"))

    return of_size


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_matches_its_bare_loop(name, world_size, world):
    folder = world(world_size)
    found = load(folder / name / "last.pth")
    assert found["step"] == NUM_STEPS
    assert difference(found["model"], JOBS[name].bare(NUM_STEPS)) < 1e-10
    assert_same_bits(found, load(folder / f"{name}-again" / "last.pth"))
