"""Synthetic interactions: users who watch series.

Each topic has a series of items in order; earlier items are better known (Zipf's law). A user likes a few topics. From
visit to visit old interests fade, and sometimes a new interest appears. No user watches an item twice.

SHORT_GAPS separate the items of a visit, and LONG_GAPS separate visits. Three rules choose items:

- A visit opens with a leap to an attractive item: an item, often well known, of a topic that the user likes.
- After the opener, the user **resumes the thread of the previous visit** with the sequel of the item before the opener.
- A thread is a run of sequels. At the end of the series, and sometimes earlier, the user **begins another thread** with
  a similar leap.

A leap is followed by its own sequel or by the sequel of the item before the leap. The items do not show which, but the
time before the leap does: after a short gap, the leap began a thread; after a long gap, it opened a visit.
"""

from pathlib import Path

import numpy as np

from data.interactions.reader import Interactions
from trainer.loading.cache import Arrays, cached_arrays
from trainer.loading.counter_random import uniform

NUM_USERS = 1500
NUM_TOPICS = 20
ITEMS_PER_TOPIC = 20
NUM_ITEMS = NUM_TOPICS * ITEMS_PER_TOPIC
"""Number of items; topic k, from 0, has items from ITEMS_PER_TOPIC * k + 1, in the order of its series."""
LENGTHS = (8, 96)
"""Smallest and largest number of interactions per user; short histories are more frequent."""
PACE_S = (1200, 2400)
"""Range, in seconds, of a user's pace, which is about the length of an episode."""
SHORT_GAPS = (1, 3)
"""Range of the time between two items of a visit, in units of the user's pace."""
LONG_GAPS = (25, 60)
"""Range of the time between two visits, in units of the user's pace: 8 to 40 hours."""

_VISIT_ENDS = {"after a leap": 0.07, "after a sequel": 0.28}
_THREAD_CHANGES = {"after a leap": 0.05, "after a sequel": 0.18}
"""Probabilities that a visit ends, or that another thread begins, before an interaction."""
_SEQUEL_SKIPPED = 0.1
_FIRST_INTERESTS = (1.0, 0.6, 0.4)
_INTEREST_KEPT = 0.9
"""Factor by which each visit multiplies all of a user's interests."""
_NEW_INTEREST = 0.2
"""Probability that a new interest, of strength 1, appears in a visit."""
_CURIOSITY = 0.002
"""Smallest interest in a topic."""
_JOINED_S = (1_700_000_000, 1_720_000_000)
"""Range of the Unix time of users' first interactions."""

_SEED = 0
_FORMAT_VERSION = 1
_USER_STREAM, _STEP_STREAM, _GAP_STREAM = range(3)


def load_synthetic_interactions(cache_dir: Path) -> Interactions:
    """Generates about 56,000 interactions of 1,500 users with 400 items; the result is fixed, and cached."""
    key = f"interactions_synthetic-{_FORMAT_VERSION}"
    arrays = cached_arrays(cache_dir, key, generate)
    item_ids = tuple(map(str, range(1, NUM_ITEMS + 1)))
    return Interactions(arrays["offsets"], arrays["items"], arrays["times"], NUM_ITEMS, key, item_ids)


def generate() -> Arrays:
    """Returns the arrays `offsets`, `items` and `times` of Interactions.

    The arrays are equal on every machine: computing them takes only counter-based hashing, arithmetic and comparisons.
    """
    traits = uniform(_SEED, 0, np.arange(NUM_USERS), (7,), _USER_STREAM).astype(np.float64)
    shortest, longest = LENGTHS
    lengths = _between((shortest, longest + 1), traits[:, :2].min(axis=1)).astype(np.int64)
    items, is_opener = _watch(_Viewers(first_topics=_pick_topics(traits[:, 4:])), longest)
    times = _times(is_opener, _between(PACE_S, traits[:, 2]), _between(_JOINED_S, traits[:, 3]))
    happened = np.arange(longest) < lengths[:, None]
    return {
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "items": items[happened].astype(np.int32),
        "times": times[happened],
    }


class _Viewers:
    """Interests, unseen items and current threads of users. Items are numbered from 0 here.

    interests: (U, topics), strengths of interest.
    unseen: (U, topics, items of a topic) bool.
    thread: (U,) int64, last item of each user's thread.
    """

    def __init__(self, first_topics: np.ndarray) -> None:
        """Creates the users. first_topics: (U, 3), strongest interest first; interests in a repeated topic add up."""
        num_users = len(first_topics)
        self.interests = np.zeros((num_users, NUM_TOPICS))
        for topics, strength in zip(first_topics.T, _FIRST_INTERESTS, strict=True):
            self.interests[np.arange(num_users), topics] += strength
        self.unseen = np.ones((num_users, NUM_TOPICS, ITEMS_PER_TOPIC), dtype=bool)
        self.thread = np.zeros(num_users, dtype=np.int64)

    def drift(self, users: np.ndarray, draws: np.ndarray) -> None:
        """Changes the interests of users (n,) between visits. draws: (n, 2) in [0, 1)."""
        self.interests[users] *= _INTEREST_KEPT
        finds_new = draws[:, 0] < _NEW_INTEREST
        self.interests[users[finds_new], _pick_topics(draws[finds_new, 1])] += 1

    def leap(self, users: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Draws an attractive unseen item for each of the users (n,): (n,) int64. draws: (n,) in [0, 1)."""
        renown = 1 / np.arange(1, ITEMS_PER_TOPIC + 1)
        interests = self.interests[users] + _CURIOSITY
        weights = interests[:, :, None] * renown * self.unseen[users]
        return _pick(weights.reshape(len(users), NUM_ITEMS), draws)

    def sequel(self, users: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Returns the next unseen item of each user's thread, sometimes skipping one; -1 at the thread's end."""
        topic, position = np.divmod(self.thread[users], ITEMS_PER_TOPIC)
        ahead = self.unseen[users, topic] & (np.arange(ITEMS_PER_TOPIC) > position[:, None])
        count = np.cumsum(ahead, axis=1)
        wanted = np.minimum(1 + (draws < _SEQUEL_SKIPPED), count[:, -1])
        found = topic * ITEMS_PER_TOPIC + np.argmax(count == wanted[:, None], axis=1)
        return np.where(wanted > 0, found, -1)


def _watch(viewers: _Viewers, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns items, from 1, and whether each opens a visit: (U, num_steps) int64 and bool."""
    users = np.arange(len(viewers.thread))
    items = np.zeros((len(users), num_steps), dtype=np.int64)
    is_opener = np.zeros((len(users), num_steps), dtype=bool)
    leapt = np.zeros(len(users), dtype=bool)
    for step in range(num_steps):
        event, item, *drift = uniform(_SEED, step, users, (4,), _STEP_STREAM).astype(np.float64).T
        visit_ends, thread_changes = (
            np.where(leapt, p["after a leap"], p["after a sequel"]) for p in (_VISIT_ENDS, _THREAD_CHANGES)
        )
        opens = (event < visit_ends) | (step == 0)
        viewers.drift(users[opens], np.stack(drift, axis=1)[opens])
        watched = viewers.sequel(users, item)
        leapt = opens | (event < visit_ends + thread_changes) | (watched < 0)
        watched[leapt] = viewers.leap(users[leapt], item[leapt])
        viewers.unseen.reshape(len(users), NUM_ITEMS)[users, watched] = False
        # a user's first opener has no earlier thread, so it begins a thread
        viewers.thread = np.where(opens & (step > 0), viewers.thread, watched)
        items[:, step], is_opener[:, step] = watched + 1, opens
    return items, is_opener


def _times(is_opener: np.ndarray, pace_s: np.ndarray, joined_s: np.ndarray) -> np.ndarray:
    """Returns times of all steps in seconds: (U, num_steps) int64. pace_s, joined_s: (U,), in seconds."""
    num_users, num_steps = is_opener.shape
    draws = uniform(_SEED, 0, np.arange(num_users), (num_steps,), _GAP_STREAM).astype(np.float64)
    # squared, so that short gaps are more frequent than long ones
    gaps = np.where(is_opener, _between(LONG_GAPS, draws**2), _between(SHORT_GAPS, draws**2))
    seconds = (gaps * pace_s[:, None]).astype(np.int64)
    seconds[:, 0] = joined_s
    return np.cumsum(seconds, axis=1)


def _pick_topics(draws: np.ndarray) -> np.ndarray:
    """Draws topics in proportion to their popularity: int64 in the shape of `draws`."""
    renown = 3 / (3 + np.arange(NUM_TOPICS))
    return _pick(np.broadcast_to(renown, (draws.size, NUM_TOPICS)), draws.ravel()).reshape(draws.shape)


def _pick(weights: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Draws a column index per row with probabilities proportional to weights (n, k): (n,) int64. draws: in [0, 1)."""
    cumulated = np.cumsum(weights, axis=1)
    return np.argmax(cumulated > draws[:, None] * cumulated[:, -1:], axis=1)


def _between(limits: tuple[int, int], fraction: np.ndarray) -> np.ndarray:
    low, high = limits
    return low + (high - low) * fraction
