"""Tests profiler.py batch-size: the search, and what limits it."""

import json

import pytest

from tests.profiling.conftest import ANY_BATCH, SHORT, SLEEPY
from trainer.profiling.batch_size import search


@pytest.mark.parametrize("limit", [7, 8, 9, 15, 16, 17, 100, 127, 128, 129, 1000, 1024, 5000])
def test_the_search_finds_the_limit_within_a_sixteenth(limit):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    largest, is_limit = search(fits, 8, 1024)
    assert len(set(tried)) == len(tried) < 14
    assert is_limit == (limit < 1024)
    if limit < 8:
        assert largest is None
    else:
        assert min(limit, 1024) * (1 - 1 / 16) - 1 <= largest <= min(limit, 1024)


def test_batch_size_command_finds_the_largest_and_the_fastest_size(profile_here, tmp_path):
    """A forward pass takes 20 ms for any batch, so the largest is the fastest. There are 40 samples."""
    arguments = [*ANY_BATCH, *SHORT, "--delay-s", "0.02", "--json", tmp_path / "sizes.json"]
    out = profile_here("batch-size", *arguments).out
    result = json.loads((tmp_path / "sizes.json").read_text())
    assert [row["batch_size"] for row in result["batch_sizes"]] == [8, 16, 32, 40]
    assert all(row["step_ms_median"] >= 20 and row["peak_memory_mib"] > 50 for row in result["batch_sizes"])
    assert (result["largest_batch_size"], result["larger_ones_do_not_fit"]) == (40, False)
    assert result["fastest_batch_size"] in (32, 40)
    assert out.splitlines()[-2].endswith("Largest: 40 (all training samples; all fit).")


def test_batch_size_command_says_that_the_data_bounds_the_smallest(profile_here):
    out = profile_here("batch-size", *ANY_BATCH, *SHORT, "--min-batch-size", "50", "--max-batch-size", "60").out
    assert "--min-batch-size 50: starting at 40, the number of training samples.\nbatch of 40: " in out


@pytest.mark.slow
def test_batch_size_command_finds_the_memory_limit(profile_here, tmp_path):
    arguments = ["--task", SLEEPY, *ANY_BATCH[2:], *SHORT, "--room", "20", "--json", tmp_path / "sizes.json"]
    out = profile_here("batch-size", *arguments).out
    result = json.loads((tmp_path / "sizes.json").read_text())
    fits = {row["batch_size"]: row["fits"] for row in result["batch_sizes"]}
    assert fits == {size: size <= 20 for size in (8, 16, 20, 21, 22, 24, 32)}
    assert (result["largest_batch_size"], result["larger_ones_do_not_fit"]) == (20, True)
    assert "batch of 32: out of memory" in out
