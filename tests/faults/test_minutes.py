"""Two processes save and pause together when the time is up, and the time limit does not change the result."""

import json
from dataclasses import replace

import pytest

from tests.faults.lives import IN_STEPS, Life, assert_as_unbroken


@pytest.mark.slow
def test_two_processes_pause_together_and_resume(tmp_path, forked, unbroken):
    life = Life(tmp_path / "run", replace(IN_STEPS, argv=(*IN_STEPS.argv, "--max-minutes", 0.002)))
    job = life.attempt(forked, 2)
    assert life.statuses == [0, 0], job.output
    assert "--max-minutes 0.002: time is up after " in job.output
    state = json.loads((life.directory / "state.json").read_text())
    assert state["state"] == "paused" and state["step"] < IN_STEPS.max_steps
    life.recipe = IN_STEPS
    life.attempt(forked, 2)
    assert life.statuses == [0, 0]
    assert_as_unbroken(life, unbroken(IN_STEPS, 2), same_bits=True)
