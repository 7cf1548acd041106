"""The tests of this folder detect each mistake of `tests.faults.mutants`."""

import random

import pytest

from tests.faults.lives import Life, assert_as_unbroken
from tests.faults.watched import RECIPE, assert_durable_order, killed_at, named_points, restarted_without_power, watch


@pytest.mark.parametrize(
    ("mutant", "difference"),
    [
        ("position_off_by_one", "the samples after optimizer step . were not all consumed"),
        ("moments_not_restored", "/model/"),
        ("average_not_restored", "/model/"),
        ("sums_not_restored", "other epoch records"),
        ("metrics_not_cut_back", "other step records"),
        ("best_not_restored", "/best/epoch"),
    ],
)
def test_a_kill_detects_state_that_a_resume_forgets(mutant, difference, fresh, tmp_path, forked):
    point = named_points(fresh.operations)["after fsync"]
    with pytest.raises(AssertionError, match=difference):
        assert_as_unbroken(killed_at(tmp_path, point, forked, mutant), fresh.life, same_bits=True)


@pytest.mark.parametrize(
    ("mutant", "difference"),
    [
        ("checkpoint_not_flushed", ".tmp got its name before its content was on the disk"),
        ("named_before_flushed", ".tmp got its name before its content was on the disk"),
        ("listed_after_named", ".pth got its name before the manifest was on the disk"),
        ("folder_not_flushed", "the name of .* is not on the disk"),
        ("evicted_first", ".pth was deleted before another took its place"),
    ],
)
def test_a_wrong_order_is_found_in_the_recorded_operations(mutant, difference, tmp_path, forked):
    watched = watch(Life(tmp_path / "run", RECIPE), forked, mutant)
    with pytest.raises(AssertionError, match=difference):
        assert_durable_order(watched.operations)


@pytest.mark.parametrize(
    ("mutant", "difference"),
    [
        ("checkpoint_not_flushed", "step . was lost|is damaged"),
        ("evicted_first", "No intact best checkpoint was found|step . was lost"),
    ],
)
def test_a_power_failure_detects_unsynced_files(mutant, difference, fresh, tmp_path, forked):
    watched = watch(Life(tmp_path / "run", RECIPE), forked, mutant)
    draw = random.Random(0)
    with pytest.raises(AssertionError, match=difference):
        for i in range(60):
            restarted_without_power(tmp_path / str(i), watched, draw, fresh.life, forked)
