"""Every world size gives the same result, and a stopped run resumes. test_kills.py tests kills."""

import json
import signal

import pytest

from tests.conftest import largest_difference, load, read_metrics
from tests.faults.lives import DOUBLE, HARD, Life, assert_as_unbroken

WORLDS = (1, 2, 3)


def test_every_world_size_gives_the_same_weights(unbroken):
    one = unbroken(DOUBLE, 1)
    for world_size in WORLDS[1:]:
        other = unbroken(DOUBLE, world_size)
        assert other.batches == one.batches
        assert largest_difference(load(one.directory / "final.pth"), load(other.directory / "final.pth")) < 1e-9
        records = zip(*(read_metrics(life.directory, "epoch") for life in (one, other)), strict=True)
        for mine, theirs in records:
            assert theirs.pop("event") == mine.pop("event")
            assert theirs == pytest.approx(mine, rel=1e-9)


def test_every_test_sample_is_scored_once(unbroken):
    """There are only two test samples, so one of three ranks has none."""
    for world_size in WORLDS:
        results = json.loads((unbroken(DOUBLE, world_size).directory / "results.json").read_text())
        assert results["metrics"]["test/num_samples"] == 2
        assert results["world_size"] == world_size


def test_a_stop_signal_saves_and_the_same_command_resumes(tmp_path, forked, unbroken):
    life = Life(tmp_path / "run", HARD)
    job = life.attempt(forked, 1, lambda job: job.send(signal.SIGTERM))
    assert life.statuses == [128 + signal.SIGTERM], job.output
    assert "everything is saved" in job.output
    life.attempt(forked, 1)
    assert life.statuses == [0]
    assert_as_unbroken(life, unbroken(HARD, 1), same_bits=True)
