"""Jobs as people write them learn what their own loops learn: on 1 and 2 processes, in micro-batches, and resumed.

Each without a trick. SimCLR, CLIP and other losses of all rows: tests/loop/test_joint.py.
"""

import dataclasses
import functools
import json

import pytest

from tests.conftest import ROOT, assert_same_bits, cut_back, load
from tests.helpers.forks import call_on_ranks
from tests.helpers.jobs import GLOBAL_BATCH, JOBS
from tests.helpers.weights import difference
from trainer.cli import main

FILE = ROOT / "tests" / "helpers" / "jobs.py"
NUM_STEPS, STOPPED_AT = 10, 6
"""Four steps make an epoch of most jobs, the last one of two samples."""


def run_all(environment, folder):
    """What each process of a world does: every job, and it again from the middle of its second epoch."""
    for name in JOBS:
        if run_once(environment, name, folder / name):
            return 1
        if environment.rank == 0:
            entries = json.loads((folder / name / "manifest.json").read_text())["checkpoints"]
            (stopped,) = [i for i, entry in enumerate(entries) if entry["step"] == STOPPED_AT]
            cut_back(folder / name, entries[: stopped + 1], folder / f"{name}-again")
        if run_once(environment, name, folder / f"{name}-again"):
            return 1
    return 0


def run_once(environment, name, place):
    size = GLOBAL_BATCH // 2 - (environment.world_size == 2)  # two micro-batches, also of a process
    argv = [
        "--task", f"{FILE}:{name}", "--max-steps", NUM_STEPS, "--global-batch-size", GLOBAL_BATCH, "--batch-size", size,
        "--device", "cpu", "--num-threads", 1, "--save-every-steps", STOPPED_AT, "--keep-checkpoints", 0,
        "--save-dir", place,
    ]  # fmt: skip
    argv = [str(argument) for argument in argv]
    if environment.world_size == 1:
        return main(argv, several_devices=False)
    meeting = dataclasses.replace(environment, init_method=f"{environment.init_method}-{place.name}")
    return main([*argv, "--multi-gpu", "ddp"], several_devices=True, environment=meeting)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Trains all jobs in a world of so many processes, once: the folder of their runs."""

    @functools.cache
    def of_size(world_size):
        folder = tmp_path_factory.mktemp("world")
        statuses = call_on_ranks(functools.partial(run_all, folder=folder), world_size, folder)
        assert statuses == [0] * world_size, (folder / "rank0.txt").read_text()[-3000:]
        return folder

    return of_size


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_learns_what_its_own_loop_learns(name, world_size, world):
    folder = world(world_size)
    found = load(folder / name / "last.pth")
    assert found["step"] == NUM_STEPS
    assert difference(found["model"], JOBS[name].bare(NUM_STEPS)) < 1e-10
    assert_same_bits(found, load(folder / f"{name}-again" / "last.pth"))
