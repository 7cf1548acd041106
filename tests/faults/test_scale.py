"""A run on 32 processes, one of which is killed, resumes on 24 and ends like a run on one process."""

import os
import signal
import time

import pytest

from tests.conftest import WEIGHTED
from tests.faults.job import wait_until
from tests.faults.lives import Life, Recipe, assert_as_unbroken

MANY, FEWER = 32, 24
EXACT = Recipe(
    argv=(
        "--task", WEIGHTED, "--num-train", 20 * 96, "--num-val", 5, "--global-batch-size", 96, "--epochs", 1,
        "--num-threads", 1, "--save-every-steps", 5, "--dtype", "float64", "--delay-s", 0.2,
    ),
    global_batch_size=96,
    num_samples=20 * 96,
    epochs=1,
)  # fmt: skip


@pytest.mark.slow
def test_many_processes_match_one_and_resume_on_fewer_after_a_kill(forked, unbroken, tmp_path):
    life = Life(tmp_path / "run", EXACT)

    def kill_one(job):
        assert wait_until(lambda: list(life.directory.glob("checkpoint_0_0_480.pth")), job), job.output
        os.kill(int(sorted(job.folder.glob("*.jsonl"))[-1].stem), signal.SIGKILL)

    began = time.monotonic()
    job = life.attempt(forked, MANY, kill_one)
    assert -signal.SIGKILL in life.statuses and 0 not in life.statuses
    assert f" of {MANY} is gone (process " in job.output
    job = life.attempt(forked, FEWER)
    assert life.statuses == [0] * FEWER, job.output
    assert life.parts[-1].first_step >= 5
    print(f"{MANY} processes, then {FEWER}: {time.monotonic() - began:.0f} s")
    assert_as_unbroken(life, unbroken(EXACT, 1), same_bits=False)
