"""Tests histories, held-out items and negatives against slow references per user."""

import os
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from data.interactions.hold_out import HoldOut
from data.interactions.item_sets import ItemSets, distinct_below
from data.interactions.reader import Interactions, load_interactions
from data.interactions.sequences import Negatives, split_interactions
from tests.helpers.on_device import HERE, assert_equal_on_a_device
from trainer.common.errors import UserError
from trainer.loading.counter_random import below, random_bits
from trainer.loading.on_device import moved
from trainer.loading.order import SampleKeys, evaluation_keys

MAXLEN = 6


def from_lists(items: list[list[int]], times: list[list[int]] | None, num_items: int, key: str) -> Interactions:
    return Interactions(
        offsets=np.cumsum([0] + [len(row) for row in items]),
        items=np.array([*chain(*items)], np.int32),
        times=None if times is None else np.array([*chain(*times)], np.int64),
        num_items=num_items,
        key=f"test_sequences {key}",
    )


def random_lists(num_items: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns items and times of users with 0 to 15 interactions, some with repeated items or equal times."""
    rng = np.random.default_rng(0)
    counts = [0, 1, 2, 3, 4, 15, 8, 7, *rng.integers(1, 16, 40).tolist()]
    items = [rng.integers(1, num_items + 1, n).tolist() for n in counts]
    # User 4 has the same time four times; the smallest gap of user 5 lies between validation and test.
    times = [np.sort(rng.choice(40, n)).cumsum().tolist() for n in counts]
    times[4] = [77] * 4
    times[5] = [*(10 * t + t % 3 for t in range(14)), 132]
    return items, times


ITEMS, TIMES = random_lists(num_items=130)
EVALUATED = [user for user, row in enumerate(ITEMS) if len(row) >= 3]


@pytest.fixture(scope="module")
def interactions() -> Interactions:
    return from_lists(ITEMS, TIMES, 130, "lists")


@pytest.fixture
def make(interactions, cache_dir):
    def run(of: Interactions = interactions, **changes):
        settings = {
            "seed": 0,
            "maxlen": MAXLEN,
            "whole_histories": False,
            "negatives": Negatives(2, per_position=True),
            "eval_negatives": "parity",
            "mask_seen": True,
        }
        hold_out = changes.pop("hold_out", HoldOut())
        return split_interactions(of, cache_dir, hold_out, **settings | changes)

    return run


def whole(dataset, epoch: int = 0) -> dict[str, np.ndarray]:
    return dataset.__getitems__(SampleKeys(np.arange(len(dataset)), epoch))


def trained_on(row: list[int]) -> list[int]:
    return row[:-2] if len(row) >= 3 else row


def slow_scaled_times(row: list[int]) -> list[int]:
    gaps = [b - a for a, b in pairwise(row) if b > a]
    return [round((t - row[0]) / min(gaps, default=1)) + 1 for t in row]


def pad(row: list[int], width: int) -> list[int]:
    return row + [0] * (width - len(row))


# The split


def test_training_equals_a_slow_reference(make) -> None:
    train = make()["train"]
    users = [user for user, row in enumerate(ITEMS) if len(trained_on(row)) >= 2]
    assert train.users.tolist() == users and len(train) == len(users)
    batch = whole(train)
    for i, user in enumerate(users):
        row = trained_on(ITEMS[user])[-MAXLEN - 1 :]
        scaled = slow_scaled_times(trained_on(TIMES[user]))[-MAXLEN - 1 :]
        assert batch["items"][i].tolist() == pad(row[:-1], MAXLEN)
        assert batch["targets"][i].tolist() == pad(row[1:], MAXLEN)
        assert batch["times"][i].tolist() == pad(scaled[:-1], MAXLEN)
        assert batch["length"][i] == train.num_terms(np.array([i]))[0] == len(row) - 1
    assert {batch[name].dtype for name in ("items", "targets", "length", "negatives")} == {np.dtype(np.int64)}
    assert batch["times"].dtype == np.int32


def test_whole_histories_are_split_into_pieces_with_each_item_once(make) -> None:
    expected = []
    for user, row in enumerate(ITEMS):
        train, scaled = trained_on(row), slow_scaled_times(trained_on(TIMES[user]))
        for stop in range(len(train), 1, -MAXLEN):
            piece = slice(max(stop - 1 - MAXLEN, 0), stop)
            expected.append((user, train[piece], scaled[piece][:-1]))
    assert any(len(row) == 2 for _, row, _ in expected) and Counter(user for user, _, _ in expected)[5] == 2
    train = make(whole_histories=True)["train"]
    batch = whole(train)
    assert train.users.tolist() == [user for user, _, _ in expected] and len(train) == len(expected)
    for i, (_, row, scaled) in enumerate(expected):
        assert batch["items"][i].tolist() == pad(row[:-1], MAXLEN)
        assert batch["targets"][i].tolist() == pad(row[1:], MAXLEN)
        assert batch["times"][i].tolist() == pad(scaled, MAXLEN)
        assert batch["length"][i] == train.num_terms(np.array([i]))[0] == len(row) - 1
        assert not set(batch["negatives"][i].ravel().tolist()) & set(trained_on(ITEMS[train.users[i]]))
    assert batch["length"].sum() == sum(max(len(trained_on(row)) - 1, 0) for row in ITEMS)
    assert not np.array_equal(*batch["negatives"][train.users == 5])
    assert np.array_equal(train.item_popularity, make()["train"].item_popularity)


@pytest.mark.parametrize(("name", "held_back"), [("val", 2), ("test", 1)])
def test_evaluation_equals_a_slow_reference(make, name, held_back) -> None:
    dataset = make()[name]
    assert sorted(dataset.users.tolist()) == EVALUATED
    assert dataset.users.tolist() == sorted(EVALUATED, key=lambda user: len(ITEMS[user]))
    batch = whole(dataset)
    seen_widths = []
    for i, user in enumerate(dataset.users):
        history, target = ITEMS[user][:-held_back], ITEMS[user][-held_back]
        scaled = slow_scaled_times(TIMES[user][:-held_back])
        assert batch["items"][i].tolist() == pad(history[-MAXLEN:], MAXLEN)
        assert batch["times"][i].tolist() == pad(scaled[-MAXLEN:], MAXLEN)
        assert batch["length"][i] == len(history[-MAXLEN:]) and batch["target"][i] == target
        seen = set(history) - {target}
        assert set(batch["seen"][i].tolist()) - {0} == seen
        seen_widths.append(len(history))
    assert batch["seen"].shape[1] == max(seen_widths)
    assert {batch[n].dtype for n in ("items", "target", "length", "candidates", "seen")} == {np.dtype(np.int64)}


def test_the_test_lists_cover_the_relevant_cases() -> None:
    repeated_target = [user for user in EVALUATED if ITEMS[user][-1] in ITEMS[user][:-1]]
    repeated_validation = [user for user in EVALUATED if ITEMS[user][-2] in ITEMS[user][:-2]]
    assert repeated_target and repeated_validation


def test_batches_are_as_wide_as_their_longest_row(make) -> None:
    data = make()
    lengths = data["train"].num_terms(np.arange(len(data["train"])))
    for length in (1, 3, MAXLEN):
        short = np.flatnonzero(lengths <= length)
        batch = data["train"].__getitems__(SampleKeys(short, 0))
        assert {batch[name].shape[1] for name in ("items", "targets", "times", "negatives")} == {length}
    first = data["val"].__getitems__(SampleKeys(np.array([0]), 0))
    assert first["items"].shape == first["times"].shape == (1, 1)
    everything = whole(make(maxlen=200)["train"])
    assert everything["items"].shape[1] == max(len(trained_on(row)) for row in ITEMS) - 1


def test_absent_or_unrequested_fields_are_missing(make) -> None:
    data = make(from_lists(ITEMS, None, 130, "no times"), negatives=None, mask_seen=False)
    assert whole(data["train"]).keys() == {"items", "targets", "length"}
    assert whole(data["val"]).keys() == whole(data["test"]).keys() == {"items", "length", "target", "candidates"}


@pytest.mark.parametrize("with_times", [True, False])
@pytest.mark.parametrize(
    ("negatives", "eval_negatives", "whole_histories"),
    [
        (Negatives(2, per_position=True), "parity", False),
        (Negatives(70, per_position=True), "unseen", True),  # more draws than items
        (Negatives(9, per_position=False), "clean", True),
        (None, "parity", False),
    ],
)
def test_batches_on_a_device_equal_batches_on_the_host(
    make, interactions, negatives, eval_negatives, whole_histories, with_times
) -> None:
    data = make(
        interactions if with_times else from_lists(ITEMS, None, 130, "no times"),
        negatives=negatives,
        eval_negatives=eval_negatives,
        whole_histories=whole_histories,
        mask_seen=with_times,
    )
    assert_equal_on_a_device(list(data.values()))
    keys = SampleKeys(np.arange(8), 0)
    lengths = data["train"].__getitems__(keys)["length"]
    weights = data["train"].weights(keys)
    assert weights.dtype == np.float32 and weights.tolist() == lengths.tolist() and len(set(weights)) > 1


def test_tensors_shared_by_parts_of_a_split_are_moved_once(make) -> None:
    train, val, test = moved(list(make().values()), HERE)
    assert train._items is val._items is test._items and train._sets is val._candidates.excluded
    assert isinstance(train._items, torch.Tensor) and isinstance(train._lengths, np.ndarray)


def test_a_split_may_have_no_user_to_evaluate(make) -> None:
    for kind in ("clean", "unseen", "parity"):
        data = make(from_lists([[1, 2], [3]], [[5, 6], [7]], 130, f"short {kind}"), eval_negatives=kind)
        assert len(data["val"]) == len(data["test"]) == 0
        assert whole(data["test"])["candidates"].shape == (0, 100)
        assert whole(data["train"])["items"].tolist() == [[1]]


def slow_shares(kind: str, val_share: float, test_share: float) -> list[tuple[int, int]]:
    """Returns per user the end of the training part and the end of the validation part."""
    everything = sorted(t for row in TIMES for t in row)
    begin = [everything[int(len(everything) * (1 - share))] for share in (val_share + test_share, test_share)]
    found = []
    for row in TIMES:
        n = len(row)
        num_val, num_test = (max(1, int(n * share)) if n >= 3 else 0 for share in (val_share, test_share))
        by_time = tuple(sum(t < limit for t in row) for limit in begin)
        found.append((n - num_val - num_test, n - num_test) if kind == "ratio" else by_time)
    return found


@pytest.mark.parametrize("kind", ["ratio", "time"])
def test_held_out_shares_equal_a_slow_reference(make, kind) -> None:
    data = make(hold_out=HoldOut(kind, val_share=0.2, test_share=0.3))
    bounds = slow_shares(kind, 0.2, 0.3)
    trained = {user: row[: bounds[user][0]] for user, row in enumerate(ITEMS) if bounds[user][0] >= 2}
    batch = whole(data["train"])
    assert data["train"].users.tolist() == list(trained)
    for i, row in enumerate(trained.values()):
        assert batch["targets"][i].tolist() == pad(row[1:][-MAXLEN:], MAXLEN)
    for name, part in (("val", 0), ("test", 1)):
        expected = []
        for user, row in enumerate(ITEMS):
            first, stop = (bounds[user][0], bounds[user][1]) if part == 0 else (bounds[user][1], len(row))
            expected += [(p, user, row[:p][-MAXLEN:], row[p], set(row[:p]) - {row[p]}) for p in range(first, stop) if p]
        expected.sort(key=lambda found: found[0])
        batch = whole(data[name])
        assert len(batch["target"]) == len(expected) > len(ITEMS) / 2
        for i, (_, user, history, target, seen) in enumerate(expected):
            assert data[name].users[i] == user and batch["target"][i] == target
            assert batch["items"][i].tolist() == pad(history, MAXLEN)
            assert set(batch["seen"][i].tolist()) - {0} == seen
        of_one_user = batch["candidates"][data[name].users == np.bincount(data[name].users).argmax()]
        assert len(np.unique(of_one_user, axis=0)) == len(of_one_user) > 1  # every target has its own draw


def test_training_items_precede_held_out_items_in_time(make) -> None:
    bounds = HoldOut("time", 0.2, 0.3).bounds(from_lists(ITEMS, TIMES, 130, "bounds"))
    train, val, test = ([t for row, a, b in zip(TIMES, *bounds, strict=True) for t in row[part(a, b)]] for part in (
        lambda a, b: slice(0, a), lambda a, b: slice(a, b), lambda a, b: slice(b, None)))  # fmt: skip
    assert max(train) < min(val) <= max(val) < min(test)
    with pytest.raises(UserError, match=r"^--split time: the interactions have no times; use --split ratio"):
        make(from_lists(ITEMS, None, 130, "timeless"), hold_out=HoldOut("time"))


# Times


def test_the_unit_of_time_comes_only_from_the_history(make) -> None:
    items = [[1, 2, 3, 4, 5]]
    first, other = ([[100, 140, 160, *future]] for future in ((161, 162), (500, 900)))
    train = [whole(make(from_lists(items, t, 130, f"unit {t}"))["train"])["times"].tolist() for t in (first, other)]
    assert train == [[[1, 3]], [[1, 3]]]
    test = whole(make(from_lists(items, first, 130, f"unit {first}"))["test"])["times"]
    assert test.tolist() == [[1, 41, 61, 62]]


def test_long_times_are_clipped(make) -> None:
    times = [[0, 1, 2**40, 2**40, 2**41]]
    batch = whole(make(from_lists([[1, 2, 3, 4, 5]], times, 130, "long"))["test"])
    assert batch["times"].tolist() == [[1, 2, 2**31 - 1, 2**31 - 1]]


# Negatives


def item_sets(sets: list[set[int]], num_items: int) -> ItemSets:
    users = np.repeat(np.arange(len(sets)), [len(s) for s in sets])
    return ItemSets.of_pairs(users, np.array([item for s in sets for item in s], np.int64), len(sets), num_items)


@pytest.mark.parametrize("num_items", [1, 2, 7, 30])
def test_numbers_map_one_to_one_onto_the_other_items(num_items) -> None:
    rng = np.random.default_rng(num_items)
    everything = set(range(1, num_items + 1))
    sizes = [0, num_items, num_items - 1, *rng.integers(0, num_items + 1, 30)]
    sets = [set(rng.permutation(num_items)[:size].tolist()) for size in sizes]
    sets = [{item + 1 for item in s} for s in sets] + [{1}, {num_items}]
    known = item_sets(sets, num_items)
    users = np.arange(len(sets))
    assert known.num_others(users).tolist() == [num_items - len(s) for s in sets]
    for user, own in enumerate(sets):
        r = np.arange(num_items - len(own))[None]
        one = np.array([user])
        assert known.others(one, r)[0].tolist() == sorted(everything - own)
        assert known._others_by_table(one, r)[0].tolist() == sorted(everything - own)


def test_table_and_search_agree_for_many_users() -> None:
    rng = np.random.default_rng(0)
    sets = [set((rng.permutation(50)[: rng.integers(0, 50)] + 1).tolist()) for _ in range(40)]
    known = item_sets(sets, 50)
    users = rng.permutation(40)[:25]
    r = rng.integers(0, known.num_others(users)[:, None], (25, 45))
    expected = [[sorted(set(range(1, 51)) - sets[u])[n] for n in row] for u, row in zip(users, r, strict=True)]
    assert known.others(users, r).tolist() == expected
    assert known.others(users, np.tile(r, 2)).tolist() == [row + row for row in expected]


def test_training_negatives_are_new_items_only_at_real_positions(make) -> None:
    for num in (1, 70):  # fewer and more draws than items
        train = make(negatives=Negatives(num, per_position=True))["train"]
        batch = whole(train)
        assert batch["negatives"].shape == (len(train), MAXLEN, num)
        for i, user in enumerate(train.users):
            length = batch["length"][i]
            real = batch["negatives"][i, :length]
            assert real.min() >= 1 and real.max() <= 130
            assert not set(real.ravel().tolist()) & set(trained_on(ITEMS[user]))
            assert not batch["negatives"][i, length:].any()
    shared = whole(make(negatives=Negatives(9, per_position=False))["train"])["negatives"]
    assert shared.shape == (len(train), 9) and shared.min() >= 1


def test_training_negatives_are_uniform(make) -> None:
    """Pearson's statistic with 6 degrees of freedom exceeds 22.5 once in a thousand."""
    small = from_lists([[2, 5, 5, 9, 9, 4]], None, 10, "uniform")  # trains on 2, 5, 5, 9; 4 and 9 are held out
    train = make(small, negatives=Negatives(3, per_position=True))["train"]
    draws = np.stack([whole(train, epoch)["negatives"] for epoch in range(1000)])
    counts = Counter(draws.ravel().tolist())
    assert sorted(counts) == [1, 3, 4, 6, 7, 8, 10]
    expected = draws.size / 7
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 22.5
    # Draws of neighbouring positions are independent: all 49 pairs are about equally frequent (48 degrees of freedom).
    pairs = Counter(zip(draws[:, 0, 0, 0].tolist(), draws[:, 0, 1, 0].tolist(), strict=True))
    assert sum((pairs[a, b] - 1000 / 49) ** 2 / (1000 / 49) for a in counts for b in counts) < 84.0


@pytest.mark.parametrize("negatives", [Negatives(3, True), Negatives(30, True), Negatives(3, False)])
def test_draws_do_not_depend_on_the_batch(make, negatives) -> None:
    train = make(negatives=negatives)["train"]
    together = whole(train, epoch=4)["negatives"]
    rng = np.random.default_rng(0)
    for _ in range(5):
        index = rng.permutation(len(train))[: rng.integers(1, 9)]
        part = train.__getitems__(SampleKeys(index, 4))
        drawn = part["negatives"]
        assert np.array_equal(drawn, together[index][:, : drawn.shape[1]])
    assert not np.array_equal(whole(train, epoch=5)["negatives"], together)
    assert not np.array_equal(whole(make(negatives=negatives, seed=1)["train"], epoch=4)["negatives"], together)


def test_draws_of_a_position_do_not_depend_on_maxlen(make) -> None:
    short, long = (whole(make(maxlen=maxlen)["train"]) for maxlen in (2, 200))
    for i in range(len(short["length"])):
        if long["length"][i] <= 2:
            assert np.array_equal(short["negatives"][i, : long["length"][i]], long["negatives"][i, : long["length"][i]])


@pytest.mark.parametrize("kind", ["parity", "unseen", "clean"])
def test_candidates_are_fixed_for_each_user_and_split(make, kind) -> None:
    data = make(eval_negatives=kind)
    for name in ("val", "test"):
        together = whole(data[name])["candidates"]
        assert together.shape == (len(EVALUATED), 100)
        for shard in ((0, 1), (1, 3)):
            for keys in evaluation_keys(len(data[name]), shard, 4):
                keys = SampleKeys(keys.index, epoch=7)
                assert np.array_equal(data[name].__getitems__(keys)["candidates"], together[keys.index])
        assert not np.array_equal(whole(make(eval_negatives=kind, seed=1)[name])["candidates"], together)
    assert not np.array_equal(whole(data["val"])["candidates"], whole(data["test"])["candidates"])


@pytest.mark.parametrize(
    ("kind", "name", "held_back"),
    [("parity", "val", 2), ("parity", "test", 2), ("unseen", "val", 1), ("unseen", "test", 0)],
)
def test_candidates_exclude_only_training_and_seen_items(make, kind, name, held_back) -> None:
    drawn: dict[int, set[int]] = {user: set() for user in EVALUATED}
    repeated = False
    for seed in range(40):
        dataset = make(seed=seed, eval_negatives=kind)[name]
        for user, row in zip(dataset.users.tolist(), whole(dataset)["candidates"].tolist(), strict=True):
            drawn[user] |= set(row)
            repeated |= len(set(row)) < 100
    assert repeated
    for user in EVALUATED:  # 4,000 draws cover all of at most 130 items
        assert drawn[user] == set(range(1, 131)) - set(ITEMS[user][: len(ITEMS[user]) - held_back])


@pytest.mark.parametrize("name", ["val", "test"])
def test_clean_candidates_are_distinct_and_new_to_the_user(make, name) -> None:
    dataset = make(eval_negatives="clean")[name]
    for user, row in zip(dataset.users, whole(dataset)["candidates"].tolist(), strict=True):
        assert len(set(row)) == 100
        assert not set(row) & set(ITEMS[user]) and set(row) <= set(range(1, 131))


def test_clean_candidates_are_all_remaining_items_if_just_enough(make) -> None:
    items = [[1, 2, 3, 4, 5], [9, 9, 9]]
    batch = whole(make(from_lists(items, None, 105, "enough"), eval_negatives="clean")["test"])
    assert sorted(batch["candidates"][1].tolist()) == list(range(6, 106))


@pytest.mark.parametrize(("num", "most"), [(1, 1), (3, 5), (8, 9), (100, 100), (100, 120), (100, 3000)])
def test_distinct_numbers_equal_floyds_algorithm(num, most) -> None:
    bits, limit = random_bits(0, 0, np.arange(60), num), np.random.default_rng(0).integers(num, most + 1, 60)
    chosen = [[] for _ in limit]
    for i in range(num):
        newest = limit - num + i
        for row, last, drawn in zip(chosen, newest, below(bits[:, i : i + 1], newest + 1)[:, 0], strict=True):
            row.append(last if drawn in row else drawn)
    assert np.array_equal(distinct_below(bits, limit), chosen)


def test_every_set_of_distinct_numbers_is_equally_probable() -> None:
    """Pearson's statistic with 19 degrees of freedom exceeds 43.8 once in a thousand."""
    bits = random_bits(0, 0, np.arange(20000), 3)
    chosen = distinct_below(bits, np.full(20000, 6))
    counts = Counter(frozenset(row) for row in chosen.tolist())
    assert len(counts) == 20 and {len(s) for s in counts} == {3}  # 6 choose 3
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 43.8
    assert set.union(*map(set, counts)) == set(range(6))


def test_too_few_items_for_negatives_are_refused(make) -> None:
    all_in_training = from_lists([[1, 2, 3, 1, 1], [1, 2, 3]], None, 3, "all")
    with pytest.raises(UserError, match=r"^--data-dir: 1 of the 3 items must be new .* leaves only 0"):
        make(all_in_training)
    with pytest.raises(UserError, match=r"^--data-dir: 1 of the 3 items must be new .* leaves only 0"):
        make(all_in_training, negatives=None)
    with pytest.raises(UserError, match=r"^--data-dir: 1 of the 2 items must be new .* leaves only 0"):
        make(from_lists([[1, 2]], None, 2, "no evaluation"))
    with pytest.raises(UserError, match=r"^--eval-negatives clean: 100 of the 103 items must be new .* only 99"):
        make(from_lists([[1, 2, 3, 4], [1, 2, 3]], None, 103, "few"), eval_negatives="clean")
    with pytest.raises(UserError, match=r"^--eval-negatives unseen: 1 of the 4 items must be new .* leaves only 0"):
        make(from_lists([[1, 2, 3, 4], [1, 2, 3]], None, 4, "all seen"), eval_negatives="unseen")
    assert len(make(from_lists([[1, 2]], None, 2, "no negatives"), negatives=None)["train"]) == 1


def test_no_training_data_is_reported(make) -> None:
    with pytest.raises(UserError, match=r"^--split leave-one-out: leaves no user with two interactions for"):
        make(from_lists([[1, 2, 3], [1]], None, 130, "three"))


# The real data


def test_movielens_1m_has_valid_samples_and_candidates(make, cache_dir) -> None:
    folder = os.environ.get("LOCKSTEP_DATA")
    if not folder or not Path(folder, "ml-1m", "ml-1m_complete_order.txt.gz").is_file():
        pytest.skip("set LOCKSTEP_DATA to a folder with ml-1m/ml-1m_complete_order.txt.gz")
    source = Path(folder, "ml-1m", "ml-1m_complete_order.txt.gz")
    interactions = load_interactions(source, 5, cache_dir)
    data = make(interactions, maxlen=200, negatives=Negatives(1, per_position=True), eval_negatives="clean")
    assert len(data["train"]) == len(data["val"]) == len(data["test"]) == 6040
    batch = whole(data["train"])
    real = np.arange(200) < batch["length"][:, None]
    assert ((batch["items"] > 0) == real).all() and ((batch["targets"] > 0) == real).all()
    assert ((batch["negatives"][:, :, 0] > 0) == real).all() and (batch["times"] > 0)[real].all()
    for name in ("val", "test"):
        for keys in evaluation_keys(6040, (0, 1), 512):
            batch = data[name].__getitems__(keys)
            candidates = np.sort(batch["candidates"], axis=1)
            assert (np.diff(candidates, axis=1) > 0).all()
            assert not (batch["candidates"] == batch["target"][:, None]).any()
    pieces = make(interactions, maxlen=200, whole_histories=True, negatives=None)["train"]
    assert len(pieces) == 8617 and pieces.num_terms(np.arange(8617)).sum() == 999_611 - 3 * 6040
