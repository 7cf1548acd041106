import hashlib
from itertools import pairwise

import numpy as np
import pytest

from data.interactions.synthetic import (
    ITEMS_PER_TOPIC,
    LENGTHS,
    LONG_GAPS,
    NUM_ITEMS,
    NUM_TOPICS,
    NUM_USERS,
    PACE_S,
    SHORT_GAPS,
    generate,
    load_synthetic_interactions,
)

CONTENT = {"offsets": "7cea177767e008c6", "items": "7bca07c3b6ea0697", "times": "f81b75e07141324f"}


@pytest.fixture(scope="module")
def arrays():
    return generate()


@pytest.fixture(scope="module")
def leaps(arrays):
    """Returns, in arrays of shape (m,), every item that continues neither of the two items before it.

    before and following are its neighbours; in_visit tells whether the gap before the item is short.
    """
    items, offsets = arrays["items"].astype(np.int64), arrays["offsets"]
    user = np.repeat(np.arange(NUM_USERS), np.diff(offsets))
    two_before, before, item, following = (items[k : len(items) - 3 + k] for k in range(4))
    gap = np.diff(arrays["times"])[1:-1]
    kept = (user[3:] == user[:-3]) & ~follows(item, before) & ~follows(item, two_before)
    return {
        "before": before[kept],
        "item": item[kept],
        "following": following[kept],
        "in_visit": gap[kept] <= SHORT_GAPS[1] * PACE_S[1],
    }


def topic(items):
    return (items - 1) // ITEMS_PER_TOPIC


def follows(later, earlier):
    """Returns whether `later` is one of the next three items in the series of `earlier`."""
    ahead = later - earlier
    return (topic(later) == topic(earlier)) & (ahead >= 1) & (ahead <= 3)


def test_the_content_matches_its_digest_and_is_cached(arrays, cache_dir) -> None:
    # Changed content needs a new _FORMAT_VERSION; otherwise old caches are read.
    assert {name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in arrays.items()} == CONTENT
    interactions = load_synthetic_interactions(cache_dir)
    assert interactions.times is not None
    assert (interactions.num_users, interactions.num_items) == (NUM_USERS, NUM_ITEMS) == (1500, 400)
    assert interactions.offsets.dtype == interactions.times.dtype == np.int64
    assert interactions.items.dtype == np.int32
    for name, array in arrays.items():
        stored = getattr(interactions, name)
        assert np.array_equal(stored, array) and not stored.flags.writeable


def test_generated_interactions_have_the_stated_sizes(arrays) -> None:
    lengths = np.diff(arrays["offsets"])
    assert arrays["offsets"][0] == 0 and arrays["offsets"][-1] == len(arrays["items"]) == len(arrays["times"])
    assert lengths.min() == LENGTHS[0] >= 3 and lengths.max() <= LENGTHS[1]
    assert 35 < lengths.mean() < 40 and np.median(lengths) < lengths.mean()
    assert np.array_equal(np.unique(arrays["items"]), np.arange(1, NUM_ITEMS + 1))


def test_no_user_has_an_item_twice(arrays) -> None:
    user = np.repeat(np.arange(NUM_USERS), np.diff(arrays["offsets"]))
    assert len(np.unique(user * (NUM_ITEMS + 1) + arrays["items"])) == len(user)


def test_popularity_is_skewed_between_topics_and_within(arrays) -> None:
    counts = np.bincount(arrays["items"], minlength=NUM_ITEMS + 1)[1:].reshape(NUM_TOPICS, ITEMS_PER_TOPIC)
    by_popularity = np.sort(counts.ravel())[::-1]
    assert by_popularity[: NUM_ITEMS // 10].sum() > 0.25 * counts.sum()
    assert by_popularity[0] > 10 * by_popularity[-1]
    assert counts[:5].sum() > 2.5 * counts[-5:].sum()
    within = counts.sum(axis=0)
    assert within[:5].sum() > 1.5 * within[-5:].sum()


def test_interests_differ_between_users_and_drift(arrays) -> None:
    lengths = np.diff(arrays["offsets"])
    long = np.flatnonzero(lengths >= 60)
    early, middle, late = (
        np.stack([shares(arrays["items"][arrays["offsets"][u] + start :][:20]) for u in long]) for start in (0, 20, 40)
    )

    def overlap(a, b):
        return np.minimum(a, b).sum(axis=1).mean()

    stranger = overlap(early, np.roll(early, 1, axis=0))
    assert stranger + 0.1 < overlap(early, late) < overlap(early, middle) - 0.1
    # The ends of the series alone would give an overlap of 0.35.
    assert overlap(early, late) < 0.32


def shares(items):
    return np.bincount(topic(items), minlength=NUM_TOPICS) / len(items)


def test_times_are_sorted_and_gaps_are_short_or_long(arrays) -> None:
    offsets, times = arrays["offsets"], arrays["times"]
    assert times.min() > 1_600_000_000 and times.max() < 1_800_000_000
    num_long = num_gaps = 0
    for start, end in pairwise(offsets):
        gaps = np.diff(times[start:end])
        assert gaps.min() >= SHORT_GAPS[0] * PACE_S[0]
        # Models divide gaps by the user's smallest gap, which is close to the pace and not below it.
        scaled = gaps / gaps.min()
        is_long = scaled > 10
        assert scaled[~is_long].max(initial=1) <= SHORT_GAPS[1] + 0.01
        assert scaled[is_long].min(initial=60) > LONG_GAPS[0] / SHORT_GAPS[1]
        assert scaled.max() <= LONG_GAPS[1] + 0.1
        num_long += is_long.sum()
        num_gaps += len(gaps)
    assert 0.15 < num_long / num_gaps < 0.25


def test_the_gap_determines_which_thread_continues(leaps) -> None:
    in_visit = leaps["in_visit"]
    own_sequel = follows(leaps["following"], leaps["item"])
    sequel_of_before = follows(leaps["following"], leaps["before"])
    # Both kinds are about equally frequent, so that the thread is a guess without the gap.
    assert 0.7 < in_visit.sum() / (~in_visit).sum() < 1.4
    assert own_sequel[in_visit].mean() > 0.65 and own_sequel[~in_visit].mean() < 0.1
    assert sequel_of_before[~in_visit].mean() > 0.65 and sequel_of_before[in_visit].mean() < 0.1


def test_the_jump_alone_hardly_predicts_the_thread(leaps) -> None:
    position = (leaps["item"] - 1) % ITEMS_PER_TOPIC
    in_visit, opener = (
        np.bincount(position[chosen], minlength=ITEMS_PER_TOPIC) / chosen.sum()
        for chosen in (leaps["in_visit"], ~leaps["in_visit"])
    )
    assert np.abs(in_visit - opener).sum() / 2 < 0.12  # a guess from the jump is right at most 56 % of the time


def test_threads_of_items_continue_for_several_items(arrays) -> None:
    items = arrays["items"].astype(np.int64)
    in_thread = follows(items[1:], items[:-1])
    goes_on = in_thread[1:][in_thread[:-1]].mean()
    assert 0.4 < goes_on < 0.6
