"""A kill before any file operation, or a power loss after any, loses no saved step."""

import random

import pytest

from tests.faults.disk import kill_points
from tests.faults.lives import FIRST_SEED, assert_as_unbroken
from tests.faults.watched import RECIPE, assert_durable_order, killed_at, named_points, restarted_without_power

# --- the order of operations -------------------------------------------------------------------------------------


def test_files_are_synced_before_renames_and_old_files_deleted_last(fresh, resumed):
    for watched in (fresh, resumed):
        kinds = {op.kind for op in watched.operations}
        assert kinds == {"open", "write", "fsync", "rename", "link", "unlink", "sync directory", "saved"}
        assert_durable_order(watched.operations)
    assert sum(op.kind == "saved" for op in fresh.operations) == RECIPE.num_steps + RECIPE.epochs


# --- kills -------------------------------------------------------------------------------------------------------


NAMED = (
    "before the temporary file",
    "half-way through it",
    "after fsync",
    "between manifest and rename",
    "in eviction",
)


@pytest.mark.parametrize("name", NAMED)
def test_a_kill_at_each_point_of_a_save_loses_nothing(name, fresh, tmp_path, forked):
    life = killed_at(tmp_path, named_points(fresh.operations)[name], forked)
    assert_as_unbroken(life, fresh.life, same_bits=True)


@pytest.mark.slow
def test_kills_before_every_disk_operation_lose_nothing(fresh, tmp_path, forked):
    points = kill_points(fresh.operations)
    for i, point in enumerate(points):
        assert_as_unbroken(killed_at(tmp_path / str(i), point, forked), fresh.life, same_bits=True)
    print(f"{len(points)} kills, one before every operation and one half-way through every write")


# --- loss of power -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_times", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_power_failure_at_any_moment_loses_nothing(num_times, fresh, resumed, tmp_path, forked):
    draw = random.Random(FIRST_SEED)
    for i in range(num_times):
        restarted_without_power(tmp_path / str(i), (fresh, resumed)[i % 2], draw, fresh.life, forked)
