"""Batches of samples of similar length, of shards one after another, and of consecutive samples."""

import tracemalloc

import numpy as np
import pytest

from trainer import bucketed_batches, even_batches, sharded_batches
from trainer.loading import order
from trainer.loading.batch_orders import BATCHES_PER_POOL, ConsecutiveBatches

SHARD_SIZES = (7, 0, 1, 12, 5, 3, 0)
ENDS = np.cumsum(SHARD_SIZES)
NUM_SAMPLES = int(ENDS[-1])
LENGTHS = np.random.default_rng(0).geometric(0.02, 5000)


def bucketed(batch_size, seed=0, epoch=0):
    return bucketed_batches(LENGTHS, batch_size, seed, epoch)


def sharded(batch_size, seed=0, epoch=0):
    return sharded_batches(SHARD_SIZES, batch_size, seed, epoch)


def consecutive(batch_size):
    return ConsecutiveBatches(NUM_SAMPLES, batch_size)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("make", [bucketed, sharded, consecutive])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 27, 28, 29, 5000, 5001])
def test_every_sample_is_in_one_batch_and_only_the_last_is_short(make, batch_size):
    num_samples = len(LENGTHS) if make is bucketed else NUM_SAMPLES
    batches = make(batch_size)
    assert sorted(np.concatenate(list(batches))) == list(range(num_samples))
    assert all(batch.dtype == np.int64 for batch in batches)
    rest = num_samples % batch_size
    assert [len(batch) for batch in batches] == num_samples // batch_size * [batch_size] + [rest] * (rest > 0)


@pytest.mark.parametrize("make", [bucketed, sharded])
def test_seeds_and_epochs_change_the_batches(make):
    orders = [as_lists(make(4, *key)) for key in [(0, 0), (1, 0), (0, 1)]]
    assert orders[0] == as_lists(make(4))
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert sorted(map(sorted, first)) != sorted(map(sorted, second))


@pytest.mark.parametrize("make", [bucketed, sharded])
def test_no_samples_make_no_batches(make):
    empty = bucketed_batches([], 4, 0, 0) if make is bucketed else sharded_batches([0, 0], 4, 0, 0)
    assert list(empty) == list(sharded_batches([], 4, 0, 0)) == list(ConsecutiveBatches(0, 4)) == []


@pytest.mark.parametrize("batch_size", [1, 3, 27, 28, 29])
def test_consecutive_batches_are_in_order(batch_size):
    assert np.concatenate(list(consecutive(batch_size))).tolist() == list(range(NUM_SAMPLES))


# --- buckets -----------------------------------------------------------------------------------------------------


def padded(batches):
    return sum(len(batch) * LENGTHS[batch].max() for batch in batches) / LENGTHS.sum()


def test_buckets_save_padding():
    batches = bucketed(16)
    shuffled = np.random.default_rng(0).permutation(len(LENGTHS))
    assert padded(np.split(shuffled, range(16, len(shuffled), 16))) > 3
    assert padded(batches) < 1.1
    assert all((np.diff(LENGTHS[batch]) >= 0).all() for batch in batches)


def test_the_batches_of_an_epoch_are_not_sorted():
    longest = [LENGTHS[batch[-1]] for batch in bucketed(8)]
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.15


def test_pools_mix_samples_of_the_same_length():
    """Sorting all samples would give the same neighbours in every epoch."""
    assert len(LENGTHS) > 3 * BATCHES_PER_POOL * 8
    neighbours = [
        {tuple(pair) for batch in bucketed(8, epoch=i) for pair in np.sort(np.c_[batch[:-1], batch[1:]])}
        for i in (0, 1)
    ]
    assert len(neighbours[0] & neighbours[1]) < 0.05 * len(neighbours[0])


def even(batch_size, seed=0, epoch=0):
    return even_batches(LENGTHS, batch_size, seed, epoch)


@pytest.mark.parametrize("batch_size", [1, 4, 16, 5000])
def test_even_batches_have_equal_total_lengths(batch_size):
    batches = even(batch_size)
    assert sorted(np.concatenate(batches)) == list(range(len(LENGTHS))) and min(map(len, batches)) > 0
    sums = np.array([LENGTHS[batch].sum() for batch in batches])
    most = batch_size * LENGTHS.mean()
    assert (sums < most + np.array([LENGTHS[batch].max() for batch in batches])).all()
    if batch_size == 16:
        assert np.mean(np.abs(sums / most - 1) < 0.2) > 0.95 and padded(batches) < 1.1
        assert min(map(len, batches)) < 6 and max(map(len, batches)) > 60


def test_seeds_and_epochs_change_even_batches():
    orders = [as_lists(even(16, *key)) for key in [(0, 0), (1, 0), (0, 1)]]
    assert orders[0] == as_lists(even(16)) and orders[0] != orders[1] != orders[2] != orders[0]


# --- shards ------------------------------------------------------------------------------------------------------


def shards_of(samples):
    return np.searchsorted(ENDS, samples, side="right")


@pytest.mark.parametrize("seed", range(5))
def test_shards_are_read_one_after_another(seed):
    read = shards_of(np.concatenate(list(sharded(4, seed))))
    borders = np.flatnonzero(np.diff(read)) + 1
    runs = [part[0] for part in np.split(read, borders)]
    assert sorted(runs) == [i for i, size in enumerate(SHARD_SIZES) if size > 0]  # no shard is read twice


def test_shards_and_their_samples_are_shuffled():
    orders = [np.concatenate(list(sharded(4, seed))) for seed in range(40)]
    assert len({tuple(dict.fromkeys(shards_of(samples))) for samples in orders}) > 30  # of 120
    assert len({tuple(samples[shards_of(samples) == 4]) for samples in orders}) > 30  # of 120
    alike = sharded_batches([5] * 40, 5, 0, 0)
    assert len({tuple(batch % 5) for batch in alike}) > 25  # shards of one size differ in their order


@pytest.mark.parametrize("make", [sharded, consecutive])
def test_lazily_made_batches_are_a_sequence(make):
    batches = make(4)
    in_turn = as_lists(batches)
    assert len(batches) == len(in_turn) == 7
    assert (batches.num_samples, batches.batch_size) == (NUM_SAMPLES, 4)
    assert as_lists(batches[i] for i in reversed(range(7))) == in_turn[::-1]
    assert as_lists(batches[2:]) == in_turn[2:] and as_lists(batches[-3:9:2]) == in_turn[-3:9:2]
    assert batches[-1].tolist() == in_turn[-1]
    with pytest.raises(IndexError):
        batches[7]


def test_orders_of_large_shards_take_little_memory():
    """The first data set has 100 shards of 10^8 samples. Of small shards, two whole orders are held at a time."""
    tracemalloc.start()
    batches = sharded_batches([10**8] * 100, 256, 0, 0)
    assert len(batches) == -(-(10**10) // 256)
    assert batches[10**7].shape == (256,)
    small = sharded_batches([order.MOST_SORTED_SAMPLES // 8] * 64, 2**14, 0, 0)
    assert sum(len(batch) for batch in small) == 8 * order.MOST_SORTED_SAMPLES
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20  # all orders of small shards take 64 MiB
