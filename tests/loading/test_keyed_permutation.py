"""The order of huge data sets is a permutation, and looks random."""

import math
import time
import tracemalloc
from functools import cache

import numpy as np
import pytest

from trainer.loading import order
from trainer.loading.order import NUM_ROUNDS, EpochOrder, keyed_permutation

HUGE = 10**10


def permutation(num_samples, seed=0, epoch=0, phase=0, num_rounds=NUM_ROUNDS):
    keys = np.random.SeedSequence([seed, epoch, phase]).generate_state(num_rounds, np.uint64)
    return keyed_permutation(keys, num_samples, np.arange(num_samples))


@cache
def drawn(num_samples, num_trials, num_rounds=NUM_ROUNDS):
    """Returns the orders of `num_trials` seeds, of shape (num_trials, num_samples)."""
    return np.stack([permutation(num_samples, seed, num_rounds=num_rounds) for seed in range(num_trials)])


def surprise(counts, expected, degrees):
    """Returns how far a chi-square statistic is above its mean, in standard deviations. degrees: degrees of freedom."""
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def pairs(first, second, num_samples, num_bins):
    """Counts pairs of samples, grouped into bins; returns an array of shape (num_bins, num_bins)."""
    cells = (first * num_bins // num_samples) * num_bins + second * num_bins // num_samples
    return np.bincount(cells.ravel(), minlength=num_bins**2).reshape(num_bins, num_bins)


@pytest.mark.parametrize("num_samples", [*range(1, 50), 99, 100, 101, 1023, 1024, 1025, 46**2 - 1, 46**2, 46**2 + 1])
def test_every_sample_occurs_once(num_samples):
    for seed in range(20):
        assert np.array_equal(np.sort(permutation(num_samples, seed)), np.arange(num_samples))


def test_every_sample_of_a_large_data_set_occurs_once():
    """Batches cross the borders of the blocks that `EpochOrder` computes at once."""
    num_samples = order.MOST_SORTED_SAMPLES + 12345
    epoch_order = EpochOrder(3, 1, 0, num_samples)
    batches = [epoch_order.take(start, min(start + 5000, num_samples)) for start in range(0, len(epoch_order), 5000)]
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(num_samples))
    # The order depends neither on where reading begins nor on how much is read.
    for start, stop in [(700_000, 700_003), (0, 1), (12_000, 40_000), (12_001, 12_001)]:
        expected = np.concatenate(batches)[start:stop]
        assert np.array_equal(epoch_order.take(start, stop), expected)
        assert np.array_equal(EpochOrder(3, 1, 0, num_samples).take(start, stop), expected)


def test_orders_never_change_between_versions():
    """Another order after an upgrade would repeat and skip samples of a resumed epoch."""
    assert permutation(12, 7, 3).tolist() == [9, 10, 8, 2, 11, 7, 5, 4, 6, 3, 0, 1]
    assert EpochOrder(7, 3, 0, HUGE).take(HUGE - 3, HUGE).tolist() == [2117469122, 8732425278, 1898744980]


SIZES = [(5, 4000), (100, 2000), (10**4, 100)]


@pytest.mark.parametrize(("num_samples", "num_trials"), SIZES)
def test_every_sample_is_equally_likely_at_every_position(num_samples, num_trials):
    num_bins = min(num_samples, 50)

    def deviation(num_rounds):
        orders = drawn(num_samples, num_trials, num_rounds)
        positions = np.broadcast_to(np.arange(num_samples), orders.shape)
        table = pairs(positions, orders, num_samples, num_bins)
        return surprise(table, orders.size / num_bins**2, (num_bins - 1) ** 2)

    assert abs(deviation(NUM_ROUNDS)) < 4
    assert abs(deviation(0)) > 100  # the test detects an order without rounds


@pytest.mark.parametrize(("num_samples", "num_trials"), SIZES)
def test_every_sample_is_equally_likely_to_follow_every_other(num_samples, num_trials):
    """The distance of successive samples modulo the number of samples is never 0, and otherwise uniform."""

    def deviation(num_rounds):
        steps = np.diff(drawn(num_samples, num_trials, num_rounds), axis=1) % num_samples
        return surprise(np.bincount(steps.ravel())[1:], num_trials, num_samples - 2)

    assert abs(deviation(NUM_ROUNDS)) < 4
    assert abs(deviation(2)) > 10


def test_all_orders_of_few_samples_are_equally_likely():
    """Few samples are the hardest case for a Feistel network, because its rounds have few values to choose from."""

    def deviation(num_rounds):
        _, counts = np.unique(drawn(5, 4000, num_rounds) @ 5 ** np.arange(5), return_counts=True)
        counts = np.pad(counts, (0, 120 - len(counts)))
        return surprise(counts, 4000 / 120, 119)

    assert abs(deviation(NUM_ROUNDS)) < 4
    assert deviation(6) > 10


@pytest.mark.parametrize("num_samples", [100, 10**4])
@pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_seeds_epochs_and_phases_are_unrelated(num_samples, step):
    """At each position of two orders, every pair of samples is equally likely."""
    num_trials, num_bins = 100, min(num_samples, 50)
    table = np.zeros((num_bins, num_bins), np.int64)
    for seed in range(num_trials):
        neighbour = permutation(num_samples, seed + step[0], *step[1:])
        table += pairs(permutation(num_samples, seed), neighbour, num_samples, num_bins)
    assert abs(surprise(table, num_trials * num_samples / num_bins**2, (num_bins - 1) ** 2)) < 4


def test_orders_of_ten_billion_samples_take_little_time_and_memory():
    tracemalloc.start()
    start = time.perf_counter()
    batch = EpochOrder(0, 0, 0, HUGE).take(HUGE // 2, HUGE // 2 + 256)
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.dtype == np.int64 and batch.shape == (256,)
    assert batch.min() >= 0 and batch.max() < HUGE and batch.max() > 2**32
    assert seconds < 0.5  # 2 ms on an idle machine
    assert peak < 2**20
