import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch

from trainer.loading.order import EpochOrder, SampleKeys, evaluation_keys, num_micro_batches, split_global_batch
from trainer.loading.workers import BatchLoader, Workers

WORLDS = (1, 2, 3, 5)


def edges(n):
    return [size for size in (n - 1, n, n + 1, 5 * n - 1, 5 * n, 5 * n + 1) if size > 0]


def test_a_permutation_contains_every_sample_once_and_depends_on_its_key():
    orders = [EpochOrder(*key, 1000).take(0, 1000) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    for order in orders:
        assert sorted(order) == list(range(1000))
    assert len({tuple(order) for order in orders}) == len(orders)


def test_permutations_never_change_between_versions():
    """Another order after an upgrade would repeat and skip samples of a resumed epoch."""
    assert EpochOrder(7, 3, 0, 12).take(0, 12).tolist() == [7, 1, 9, 6, 0, 11, 10, 4, 2, 8, 3, 5]


def test_orders_of_at_most_2_to_the_20_samples_are_made_by_sorting():
    """Another limit would change earlier runs and measured figures of that size."""
    for num_samples, is_sorted in [(2**20, True), (2**20 + 1, False)]:
        key = np.random.SeedSequence([5, 2, 1]).generate_state(2, np.uint64)
        by_sorting = np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")
        order = EpochOrder(5, 2, 1, num_samples).take(num_samples - 100, num_samples)
        assert np.array_equal(order, by_sorting[-100:]) == is_sorted


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_ranks_share_a_global_batch_exactly(world_size, micro_batch_size):
    for size in edges(world_size * micro_batch_size):
        samples = np.random.default_rng(0).permutation(1000)[:size]
        windows = [
            split_global_batch(samples, (rank, world_size), micro_batch_size, 2, 1, 0.25) for rank in range(world_size)
        ]
        counted = [i for window in windows for keys in window if not keys.placeholder for i in keys.index]
        assert sorted(counted) == sorted(samples)
        assert {len(window) for window in windows} == {num_micro_batches(size, world_size, micro_batch_size)}
        for keys in (keys for window in windows for keys in window):
            assert 1 <= len(keys.index) <= micro_batch_size
            assert set(keys.index) <= set(samples)
            assert (keys.epoch, keys.phase, keys.progress) == (2, 1, 0.25)
            if keys.placeholder:  # a batch norm refuses a single sample
                assert len(keys.index) == min(2, size, micro_batch_size)


def test_a_batch_norm_accepts_placeholders():
    placeholders = [
        keys
        for rank in range(3)
        for keys in split_global_batch(np.arange(7), (rank, 3), 2, 0)  # rank 0 has three samples, the others have two
        if keys.placeholder
    ]
    assert len(placeholders) == 2
    norm = torch.nn.BatchNorm1d(4)
    for keys in [*placeholders, *split_global_batch(np.arange(2), (2, 3), 4, 0)]:
        assert norm(torch.zeros(len(keys.index), 4)).shape == (2, 4)


@pytest.mark.parametrize("world_size", WORLDS)
def test_evaluation_counts_every_sample_once(world_size):
    for size in edges(world_size * 4):
        ranks = [list(evaluation_keys(size, (rank, world_size), 4)) for rank in range(world_size)]
        counted = [i for rank in ranks for keys in rank if not keys.placeholder for i in keys.index]
        assert sorted(counted) == list(range(size))
        assert len({len(rank) for rank in ranks}) == 1


@pytest.mark.parametrize("step", [1, 16, 2000])
def test_padded_lengths_are_few_and_only_slightly_longer(step):
    keys = SampleKeys(np.arange(2), 0)
    on_gpu = replace(keys, few_lengths=True)
    assert on_gpu.padded_length(0, step) == 0
    for steps in range(1, 300):
        for longest in edges(steps * step):
            padded = on_gpu.padded_length(np.int64(longest), step)
            assert padded % step == 0 and type(padded) is int
            assert longest <= padded < longest + max(step, longest / 8)
            assert on_gpu.padded_length(padded, step) == padded
            assert keys.padded_length(np.int64(longest), step) == longest
    for octave in (8, 16, 32):
        found = {on_gpu.padded_length(longest, step) for longest in range(octave * step + 1, 2 * octave * step + 1)}
        assert len(found) == 8


class Squares:
    def __len__(self):
        return 100

    def __getitems__(self, keys):
        return {"square": keys.index**2}


def collate(samples, keys):
    return {
        "square": torch.as_tensor(samples["square"]),
        "index": torch.as_tensor(keys.index),
        "weight": torch.ones(len(keys.index)),
    }


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_do_not_change_results(num_workers):
    load = BatchLoader([Squares()], collate, Workers(num_workers))
    for epoch in range(2):  # workers outlive an epoch
        keys = split_global_batch(EpochOrder(0, epoch, 0, 100).take(0, 100), (0, 1), 7, epoch)
        keys.append(SampleKeys(np.array([5]), epoch, placeholder=True))
        batches = list(load(keys))
        assert [b["index"].tolist() for b in batches] == [k.index.tolist() for k in keys]
        assert all((b["square"] == b["index"] ** 2).all() for b in batches)
        assert [float(b["weight"].sum()) for b in batches] == [0 if k.placeholder else len(k.index) for k in keys]
    load.close()
    assert not multiprocessing.active_children()
