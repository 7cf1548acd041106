"""Stratified hold-out."""

import numpy as np
import pytest

from data.tabular.split import stratified_hold_out

LABELS = np.random.default_rng(0).choice(5, size=997, p=[0.5, 0.3, 0.15, 0.04, 0.01])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.5, 0.9, 0.99])
def test_every_class_is_held_out_by_its_share(share) -> None:
    kept, held = stratified_hold_out(LABELS, share, seed=0)
    assert sorted([*kept, *held]) == list(range(len(LABELS)))
    for c in range(5):
        size = (c == LABELS).sum()
        assert (LABELS[kept] == c).any() and (LABELS[held] == c).any()
        assert abs((LABELS[held] == c).sum() - share * size) <= 1
    assert abs(len(held) - share * len(LABELS)) <= 3


def test_rounding_adds_up() -> None:
    labels = np.repeat(np.arange(7), 15)
    assert len(stratified_hold_out(labels, 0.1, seed=0)[1]) == 10  # 7 times 1.5


def test_small_classes() -> None:
    kept, held = stratified_hold_out(np.array([0, 1, 1, 3, 3, 3]), 0.01, seed=0)
    assert 0 in kept and set(np.array([0, 1, 1, 3, 3, 3])[held]) == {1, 3}
    kept, held = stratified_hold_out(np.array([0, 1, 1, 3, 3, 3]), 0.99, seed=0)
    assert set(np.array([0, 1, 1, 3, 3, 3])[kept]) == {0, 1, 3}


def test_seeds_and_streams_choose_different_rows_and_each_the_same_again() -> None:
    chosen = [stratified_hold_out(LABELS, 0.2, seed, stream)[1].tolist() for seed, stream in [(0, 0), (1, 0), (0, 1)]]
    assert len({tuple(rows) for rows in chosen}) == 3
    assert stratified_hold_out(LABELS, 0.2, seed=0)[1].tolist() == chosen[0]


def test_rows_have_equal_chances() -> None:
    labels = np.array([0] * 8 + [1] * 24)
    counts = np.bincount(np.concatenate([stratified_hold_out(labels, 0.25, seed)[1] for seed in range(2000)]))
    assert np.abs(counts / 2000 - 0.25).max() < 0.05
