"""A run that is killed at random moments and restarted, with any world size, ends like an uninterrupted run."""

import random
from collections import Counter
from functools import partial

import pytest

from tests.faults.lives import (
    DOUBLE,
    FIRST_SEED,
    HARD,
    IN_PARTS,
    IN_STEPS,
    assert_as_unbroken,
    broken_life,
    unbroken_life,
)


def live_and_compare(base, recipe, start, worlds, seed, unbroken):
    """Asserts that a killed run ends like an uninterrupted run; returns what the kills hit."""
    print(f"seed {seed}, worlds {worlds[:8]}")
    same_bits = len(set(worlds)) == 1 or recipe is IN_PARTS
    expected = unbroken(recipe, worlds[0])
    life = broken_life(base, recipe, start, worlds, random.Random(seed), expected.seconds / 2)
    assert_as_unbroken(life, expected, same_bits)
    return life.kills


@pytest.mark.parametrize("worlds", [pytest.param([1], marks=pytest.mark.slow), [1, 2, 3, 1]], ids=str)
def test_killed_at_random(worlds, tmp_path, forked, unbroken):
    recipe = HARD if len(worlds) == 1 else DOUBLE
    kills = live_and_compare(tmp_path, recipe, forked, worlds, FIRST_SEED, unbroken)
    assert kills.total() > 0


@pytest.mark.slow
def test_a_run_limited_in_steps_killed_at_random(tmp_path, forked, unbroken):
    assert live_and_compare(tmp_path, IN_STEPS, forked, [1], FIRST_SEED, unbroken).total() > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_runs_limited_in_steps_killed_at_random(world_size, tmp_path, forked, unbroken):
    for seed in range(FIRST_SEED + 1, FIRST_SEED + 6):
        live_and_compare(tmp_path / str(seed), IN_STEPS, forked, [world_size], seed, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [[2], [3], [1, 2, 3, 1]], ids=str)
def test_sharded_models_killed_at_random(worlds, tmp_path, forked_in_parts, unbroken):
    recipe = HARD if len(worlds) == 1 else DOUBLE
    in_parts = partial(unbroken_life, tmp_path / "unbroken", start=forked_in_parts)
    known = unbroken if len(worlds) > 1 else lambda recipe, world_size: in_parts(recipe, world_size=world_size)
    assert live_and_compare(tmp_path, recipe, forked_in_parts, worlds, FIRST_SEED, known).total() > 0


def live_until(num_kills, worlds, base, start, unbroken):
    """Runs lives until `num_kills` kills have occurred, and prints their seeds and what the kills hit."""
    recipe = HARD if len(worlds) == 1 else DOUBLE
    kills: Counter[tuple[str, str]] = Counter()
    seed = FIRST_SEED
    while kills.total() < num_kills:
        kills += live_and_compare(base / str(seed), recipe, start, worlds, seed, unbroken)
        seed += 1
    print(f"worlds {worlds}, seeds {FIRST_SEED} to {seed - 1}: {kills.total()} kills")
    for (what, where), count in sorted(kills.items()):
        print(f"  {what} {where}: {count}")


# LOCKSTEP_SEED=N sets the first seed, and pytest -s shows seeds and counts.


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [[1], [2], [3], [1, 2, 3, 1]], ids=str)
def test_killed_at_random_many_times(worlds, tmp_path, forked, unbroken):
    live_until(100, worlds, tmp_path, forked, unbroken)


@pytest.mark.slow
def test_runs_with_parts_killed_at_random_end_bit_identically(tmp_path, forked, unbroken):
    def on_one(recipe, _):
        return unbroken(recipe, 1)

    kills: Counter[tuple[str, str]] = Counter()
    seed = FIRST_SEED
    while kills.total() < 60:
        draw = random.Random(seed)
        worlds = [draw.choice((1, 2, 4)) for _ in range(100)]
        kills += live_and_compare(tmp_path / str(seed), IN_PARTS, forked, worlds, seed, on_one)
        seed += 1
    print(kills)


@pytest.mark.slow
@pytest.mark.parametrize(("worlds", "num_kills"), [([1], 120), ([2], 40), ([3], 20), ([1, 2, 3, 1], 40)], ids=str)
def test_real_command_lines_killed_at_random(worlds, num_kills, tmp_path, typed, unbroken):
    live_until(num_kills, worlds, tmp_path, typed, unbroken)
