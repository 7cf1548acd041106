"""Data sets over interactions with negative items: histories to train on, and held-out items with their histories.

Rows of a batch are left-aligned and padded behind with item 0 to `SampleKeys.padded_length`.

All randomness is a function of seed, epoch and user (or sample), never of the batch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data.interactions.hold_out import HoldOut
from data.interactions.item_sets import ItemSets, distinct_below
from data.interactions.reader import Interactions
from trainer.common.errors import UserError
from trainer.loading.arrays import Array, Ragged, cast
from trainer.loading.cache import Arrays, cached_arrays, key_of
from trainer.loading.counter_random import below, random_bits
from trainer.loading.on_device import Movable
from trainer.loading.order import SampleKeys

EvaluationNegatives = Literal["parity", "unseen", "clean"]
NUM_EVALUATION_NEGATIVES = 100

_FORMAT_VERSION = 2
_LARGEST_SCALED_TIME = np.iinfo(np.int32).max
_TRAIN_STREAM, _VAL_STREAM, _TEST_STREAM = range(3)
_TRAIN_STEP, _EVALUATION_STEP, _SEEN_STEP = 8, 16, 128
"""Multiples to which histories and lists of seen items are padded on a GPU.

Evaluation histories vary more in length and cost less than training; seen items cost almost nothing.
"""


@dataclass(frozen=True)
class Negatives:
    """Number of negative items per training sample.

    num: per position, or per user.
    per_position: draws (B, T, num); else (B, num), shared by all positions of a user.
    """

    num: int
    per_position: bool


@dataclass(frozen=True)
class _Split:
    """Boundaries of training, validation and test.

    num_train, val_end: (num_users,) int64; each user's first num_train interactions are training, then up to val_end
        validation, the rest test.
    items: sets of training items.
    scaled_times: (n,) int32 for all interactions, or None without times.
    """

    num_train: np.ndarray
    val_end: np.ndarray
    items: ItemSets
    scaled_times: np.ndarray | None


class TrainSequences(Movable):
    """Training histories of users with two or more items: predicts each item but the first.

    users: (n,) int64, the user of each sample. A history with more than maxlen items to predict gives one sample of its
        last items or, with whole_histories, enough samples to predict each item once, newest first.
    """

    stays = frozenset({"_lengths"})

    def __init__(
        self,
        interactions: Interactions,
        split: _Split,
        *,
        maxlen: int,
        whole_histories: bool,
        seed: int,
        negatives: Negatives | None,
    ) -> None:
        """maxlen: maximum inputs per sample. seed: key of the negatives."""
        self._num_users, self._items, self._times = interactions.num_users, interactions.items, split.scaled_times
        self._sets = split.items
        self._seed = seed
        self._negatives = negatives
        self._maxlen = maxlen
        num_samples = -(-np.maximum(split.num_train - 1, 0) // maxlen)
        self.users, sample = _numbered(num_samples if whole_histories else np.minimum(num_samples, 1))
        stop = split.num_train[self.users] - sample * maxlen
        self._lengths = np.minimum(stop - 1, maxlen)
        self._first = interactions.offsets[self.users] + stop - 1 - self._lengths
        self._num_others = split.items.num_others(self.users)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def item_popularity(self) -> np.ndarray:
        """Returns the share of users with each item in training, (num_items + 1,) float64; 0 for padding."""
        return np.bincount(self._sets.items, minlength=self._sets.num_items + 1) / self._num_users

    def num_terms(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of predicted items of samples (B,): (B,) int64."""
        return self._lengths[index]

    def weights(self, keys: SampleKeys) -> np.ndarray:
        return self._lengths[keys.index].astype(np.float32)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns each user's training items as inputs, and as targets one position ahead.

        {"items": (B, T) int64, "targets": (B, T) int64, "length": (B,) int64, "times": (B, T) int32 scaled times of the
        inputs, from 1 (absent without times), "negatives": int64, (B, T, num), 0 where padded, or (B, num) (absent
        unless requested)}. Negatives are uniform among items not in the user's training.
        """
        index, lengths = self.here(keys.index), self._lengths[keys.index]
        width = min(keys.padded_length(lengths.max(initial=0), _TRAIN_STEP), self._maxlen)
        length = self.here(lengths)
        rows = Ragged(self._first.take(index), length, width)
        batch = {
            "items": cast(rows.of(self._items), "int64"),
            "targets": cast(rows.of(self._items, ahead=1), "int64"),
            "length": length,
        }
        if self._times is not None:
            batch["times"] = rows.of(self._times)
        if self._negatives is not None:
            batch["negatives"] = self._draw(keys.epoch, index, rows.is_real, self._negatives)
        return batch

    def _draw(self, epoch: int, index: Array, is_real: Array, negatives: Negatives) -> Array:
        # counters run position by position, so that draws do not depend on the padding
        width = is_real.shape[1] if negatives.per_position else 1
        bits = random_bits(self._seed, epoch, index, width * negatives.num, _TRAIN_STREAM)
        items = self._sets.others(self.users.take(index), below(bits, self._num_others.take(index)))
        if not negatives.per_position:
            return items
        return items.reshape(len(index), width, negatives.num) * is_real[:, :, None]


@dataclass(frozen=True)
class _Candidates(Movable):
    """Draws a user's negatives for evaluation.

    excluded: items never drawn; all others are equally probable. distinct: without replacement.
    """

    excluded: ItemSets
    distinct: bool
    seed: int
    stream: int

    def draw(self, users: Array, turn: Array) -> Array:
        """Maps users (B,) and the indices of their held-out items from 0, (B,), to items (B, 100) int64."""
        keys = users + turn * (len(self.excluded.offsets) - 1)
        bits = random_bits(self.seed, 0, keys, NUM_EVALUATION_NEGATIVES, self.stream)
        num_others = self.excluded.num_others(users)
        r = distinct_below(bits, num_others) if self.distinct else below(bits, num_others)
        return self.excluded.others(users, r)


class EvaluationSequences(Movable):
    """Held-out items with non-empty histories before them, and negatives.

    Rows are sorted by history length, so that neighbours need little padding.

    users: (n,) int64, the user of each row.
    """

    stays = frozenset({"_position"})

    def __init__(
        self,
        interactions: Interactions,
        split: _Split,
        maxlen: int,
        candidates: _Candidates,
        *,
        is_test: bool,
        mask_seen: bool,
    ) -> None:
        """is_test: targets are test items rather than validation items."""
        self._items, self._times = interactions.items, split.scaled_times
        self._maxlen = maxlen
        self._candidates = candidates
        self._mask_seen = mask_seen
        num_interactions = np.diff(interactions.offsets)
        first, stop = (split.val_end, num_interactions) if is_test else (split.num_train, split.val_end)
        first = np.maximum(first, 1)  # the first of all follows no history
        users, turn = _numbered(np.maximum(stop - first, 0))
        order = np.argsort(first[users] + turn, kind="stable")
        self.users, self._turn = users[order], turn[order]
        self._position = first[self.users] + self._turn
        self._first = interactions.offsets[self.users]

    def __len__(self) -> int:
        return len(self.users)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns the last maxlen items of each history, in time order, and the next item.

        {"items": (B, T) int64, "length": (B,) int64, "times": (B, T) int32 scaled times, from 1 (absent without times),
        "target": (B,) int64, "candidates": (B, 100) int64, negatives, "seen": (B, S) int64, the items of the whole
        history, 0 in place of the target (absent unless requested)}.
        """
        positions = self._position[keys.index]
        longest = positions.max(initial=0)
        width = min(keys.padded_length(min(longest, self._maxlen), _EVALUATION_STEP), self._maxlen)
        index, num_seen = self.here(keys.index), self.here(positions)
        start, length = self._first.take(index), num_seen.clip(None, self._maxlen)
        target = start + num_seen
        rows = Ragged(target - length, length, width)
        batch = {
            "items": cast(rows.of(self._items), "int64"),
            "length": length,
            "target": cast(self._items.take(target), "int64"),
            "candidates": self._candidates.draw(self.users.take(index), self._turn.take(index)),
        }
        if self._times is not None:
            batch["times"] = rows.of(self._times)
        if self._mask_seen:
            most = keys.padded_length(longest, _SEEN_STEP)
            history = cast(Ragged(start, num_seen, most).of(self._items), "int64")
            batch["seen"] = history * (history != batch["target"][:, None])
        return batch


def split_interactions(
    interactions: Interactions,
    cache_dir: Path,
    hold_out: HoldOut,
    *,
    seed: int,
    maxlen: int,
    whole_histories: bool,
    negatives: Negatives | None,
    eval_negatives: EvaluationNegatives,
    mask_seen: bool,
) -> dict[str, TrainSequences | EvaluationSequences]:
    """Builds the data sets "train", "val" and "test".

    A held-out item's history has all earlier items of the user, other held-out ones included.

    seed: key of all negatives. Training negatives change with the epoch, the 100 of an evaluation never.
    maxlen: maximum history length used, >= 1; the last items.
    whole_histories: trains on all of a history, maxlen items at a time.
    negatives: for training; None for none.
    eval_negatives: drawn uniformly. "parity": with replacement, among items not in the user's training, so the
        validation item, or even the target, can occur, as in the published code of SASRec. "unseen": with replacement,
        among items neither in the user's training nor in this part or, for the test, the validation, as in the
        published code of TiSASRec. "clean": 100 distinct items without an interaction of the user, each such set
        equally probable.
    mask_seen: evaluation batches include "seen".

    Raises UserError if nothing is left to train on, or too few items for a user's negatives.
    """
    split = _load_split(interactions, cache_dir, hold_out)
    train = TrainSequences(
        interactions, split, maxlen=maxlen, whole_histories=whole_histories, seed=seed, negatives=negatives
    )
    if not len(train):
        raise UserError(
            f"{hold_out.flags}: leaves no user two interactions to train on; give more data, hold out less, or choose "
            "a smaller --k-core"
        )
    if negatives is not None:
        _check_enough_others(split.items, interactions, train.users, 1, "--data-dir")
    data: dict[str, TrainSequences | EvaluationSequences] = {"train": train}
    wanted = NUM_EVALUATION_NEGATIVES if eval_negatives == "clean" else 1
    flag = "--data-dir" if eval_negatives == "parity" else f"--eval-negatives {eval_negatives}"
    for name, stream in (("val", _VAL_STREAM), ("test", _TEST_STREAM)):
        is_test = name == "test"
        excluded = _items_excluded(interactions, split, eval_negatives, is_test)
        candidates = _Candidates(excluded, eval_negatives == "clean", seed, stream)
        part = EvaluationSequences(interactions, split, maxlen, candidates, is_test=is_test, mask_seen=mask_seen)
        _check_enough_others(excluded, interactions, part.users, wanted, flag)
        data[name] = part
    return data


def _check_enough_others(sets: ItemSets, interactions: Interactions, users: np.ndarray, wanted: int, flag: str) -> None:
    num_others = sets.num_others(users)
    fewest = num_others.min(initial=wanted)
    if fewest < wanted:
        user = users[num_others.argmin()]
        length = interactions.offsets[user + 1] - interactions.offsets[user]
        raise UserError(
            f"{flag}: negatives are items without the user, and one user, of {length:,} interactions, leaves {fewest} "
            f"of the {sets.num_items} items, where {wanted} {'is' if wanted == 1 else 'are'} needed; take that user "
            "out, or give data with more items"
        )


def _load_split(interactions: Interactions, cache_dir: Path, hold_out: HoldOut) -> _Split:
    def build() -> Arrays:
        num_train, val_end = hold_out.bounds(interactions)
        users, position = _numbered(np.diff(interactions.offsets))
        in_training = position < num_train[users]
        arrays = {"num_train": num_train, "val_end": val_end}
        arrays |= _item_sets(interactions, users, in_training).arrays
        if interactions.times is not None:
            arrays["scaled_times"] = scaled_times(interactions, interactions.times, in_training)
        return arrays

    key = key_of("split", _FORMAT_VERSION, interactions.key, hold_out)
    arrays = cached_arrays(cache_dir, key, build)
    items = ItemSets(arrays["offsets"], arrays["items"], arrays["thresholds"], interactions.num_items)
    return _Split(arrays["num_train"], arrays["val_end"], items, arrays.get("scaled_times"))


def _items_excluded(
    interactions: Interactions, split: _Split, eval_negatives: EvaluationNegatives, is_test: bool
) -> ItemSets:
    """Returns the items of each user that are never negatives in the validation, or in the test."""
    if eval_negatives == "parity":
        return split.items
    users, position = _numbered(np.diff(interactions.offsets))
    without_test = eval_negatives == "unseen" and not is_test
    return _item_sets(interactions, users, position < split.val_end[users] if without_test else position >= 0)


def _item_sets(interactions: Interactions, users: np.ndarray, chosen: np.ndarray) -> ItemSets:
    """Builds the sets of the chosen interactions, (n,) bool."""
    return ItemSets.of_pairs(users[chosen], interactions.items[chosen], interactions.num_users, interactions.num_items)


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expands counts per user, (num_users,), to the user and the index within the user from 0; (n,) int64."""
    users = np.repeat(np.arange(len(counts)), counts)
    return users, np.arange(len(users)) - (np.cumsum(counts) - counts)[users]


def scaled_times(interactions: Interactions, times: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Scales times (n,) since the user's first by the user's smallest gap, rounded, plus 1: (n,) int32.

    The gap is the smallest nonzero one between the counted interactions, (n,) bool; None counts all; 1 s if there is
    none. Counting only training interactions avoids leaking the future. After Li, Wang and McAuley, "Time interval
    aware self-attention for sequential recommendation", WSDM 2020.
    """
    users, _ = _numbered(np.diff(interactions.offsets))
    gaps = np.diff(times)
    chosen = (users[1:] == users[:-1]) & (gaps > 0)
    if counts is not None:
        chosen &= counts[1:]
    smallest = np.full(interactions.num_users, np.iinfo(np.int64).max)
    np.minimum.at(smallest, users[1:][chosen], gaps[chosen])
    smallest[smallest == np.iinfo(np.int64).max] = 1
    scaled = np.rint((times - times[interactions.offsets[users]]) / smallest[users]) + 1
    return np.clip(scaled, 1, _LARGEST_SCALED_TIME).astype(np.int32)  # files of parts need not be in time order
