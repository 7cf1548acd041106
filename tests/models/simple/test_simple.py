"""Tests simple recommenders against loops over users and their items."""

from collections import defaultdict

import numpy as np
import pytest
import torch

from models.simple import fitting
from models.simple.fitting import TrainingHistories, candidates
from models.simple.recommenders import MOST_ITEMS_OF_EASE, SIMPLE_MODELS
from trainer.common.errors import UserError

NUM_ITEMS, MAXLEN = 30, 12


@pytest.fixture(params=[True, False], ids=["ordered", "unordered"])
def histories(request):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 25)
    items = rng.integers(1, NUM_ITEMS, lengths.sum()).astype(np.int32)  # with repetitions and an item that nobody has
    return TrainingHistories(np.concatenate([[0], np.cumsum(lengths)]), items, NUM_ITEMS, request.param)


def users_of(histories):
    return [histories.items[a:b].tolist() for a, b in zip(histories.offsets[:-1], histories.offsets[1:], strict=True)]


def scores(kind, buffers, history):
    model = SIMPLE_MODELS[kind](NUM_ITEMS, MAXLEN)
    model.fill(buffers)
    rows = torch.zeros(2, MAXLEN, dtype=torch.int64)
    rows[1, : len(history)] = torch.tensor(history)
    return model(rows, torch.tensor([0, len(history)]))[1]


def popularity(users):
    return [sum(item in set(user) for user in users) for item in range(NUM_ITEMS + 1)]


def rules(users, window, favours_rare):
    strength, count = defaultdict(float), defaultdict(int)
    for user in users:
        for place, item in enumerate(user):
            count[item] += 1
            for distance in range(1, min(window, place) + 1):
                if user[place - distance] != item:
                    strength[user[place - distance], item] += 1 / distance
    return {
        (before, item): value / (count[before] * (count[item] if favours_rare else 1)) ** 0.5
        for (before, item), value in strength.items()
    }


def item_knn(users):
    has = [{number for number, user in enumerate(users) if item in user} for item in range(NUM_ITEMS + 1)]
    return {
        (a, b): len(has[a] & has[b]) / ((len(has[a]) * len(has[b])) ** 0.5 + 20)
        for a in range(1, NUM_ITEMS + 1)
        for b in range(1, NUM_ITEMS + 1)
        if a != b
    }


def ease(users, penalty):
    rows = np.array([[item in user for item in range(1, NUM_ITEMS + 1)] for user in users], float)
    inverse = np.linalg.inv(rows.T @ rows + penalty * np.eye(NUM_ITEMS))
    return {
        (a + 1, b + 1): -inverse[a, b] / inverse[b, b] for a in range(NUM_ITEMS) for b in range(NUM_ITEMS) if a != b
    }


def expected(kind, users):
    """Returns the strengths of pairs for each setting, in order."""
    if kind == "rules":
        return [rules(users, window, rare) for window in (3, 10) for rare in (False, True)]
    return [item_knn(users)] if kind == "itemknn" else [ease(users, 100), ease(users, 500)]


@pytest.mark.parametrize("kind", ["rules", "itemknn", "ease"])
def test_scores_equal_loops_over_users(kind, histories):
    if kind == "rules" and not histories.is_ordered:
        pytest.skip("rules need an order")
    users = users_of(histories)
    decays = fitting._FITTED[kind][1] if histories.is_ordered else (1.0,)
    wanted = [(strengths, decay) for strengths in expected(kind, users) for decay in decays]
    found = list(candidates(kind, histories, MAXLEN))
    assert len(found) == len(wanted)
    history, ties = [3, 7, 7, 1, 29, 12], popularity(users)
    for buffers, (strengths, decay) in zip(found, wanted, strict=True):
        own = scores(kind, buffers, history)
        assert own[0] == -torch.inf
        for item in range(1, NUM_ITEMS + 1):
            led_to = sum(strengths.get((h, item), 0) * decay**age for age, h in enumerate(reversed(history)))
            tie_break = 0 if kind == "ease" else 1e-9 * ties[item]
            assert own[item].item() == pytest.approx(led_to + tie_break, rel=1e-4, abs=1e-9)


def test_popularity_counts_users(histories):
    [buffers] = candidates("popularity", histories, MAXLEN)
    assert scores("popularity", buffers, [1])[1:].tolist() == popularity(users_of(histories))[1:]


@pytest.mark.parametrize("kind", ["rules", "itemknn"])
def test_large_catalogues_are_counted_in_blocks_with_the_same_result(kind, monkeypatch):
    rng = np.random.default_rng(1)
    histories = TrainingHistories(np.arange(0, 401, 8), rng.integers(1, 301, 400).astype(np.int32), 300, True)
    whole = list(candidates(kind, histories, MAXLEN))
    monkeypatch.setattr(fitting, "MOST_ITEMS_OF_EASE", 10)
    monkeypatch.setattr(fitting, "_PAIRS", 700)
    for sparse in (0, 10**6):  # sorts all pairs, then counts all
        monkeypatch.setattr(fitting, "_SPARSE", sparse)
        for one, other in zip(whole, candidates(kind, histories, MAXLEN), strict=True):
            np.testing.assert_allclose(one["strengths"], other["strengths"], rtol=1e-6)


def test_a_table_keeps_the_strongest_neighbours(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_NEIGHBOURS", 5)
    rng = np.random.default_rng(2)
    histories = TrainingHistories(np.arange(0, 401, 10), rng.integers(1, 31, 400).astype(np.int32), 30, True)
    kept = next(candidates("itemknn", histories, MAXLEN))["strengths"]
    strengths = item_knn(users_of(histories))
    for item in range(1, 31):
        every = sorted((value for (_, other), value in strengths.items() if other == item), reverse=True)
        np.testing.assert_allclose(kept[item], every[:5], rtol=1e-6)


def test_ease_refuses_large_catalogues():
    with pytest.raises(
        UserError, match=r"^--model ease: has a weight for each pair of items, so it supports at most 8,000 items"
    ):
        SIMPLE_MODELS["ease"](MOST_ITEMS_OF_EASE + 1, MAXLEN)
