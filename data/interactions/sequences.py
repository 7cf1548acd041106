"""Data sets of training histories, and of held-out items with their histories, with optional negatives.

The sequences of a batch are padded at the end with item 0 to `SampleKeys.padded_length`.

Random draws depend only on seed, epoch and sample.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data.interactions.hold_out import HoldOut
from data.interactions.item_sets import ItemSets, distinct_below, numbered
from data.interactions.reader import Interactions
from trainer.common.errors import UserError
from trainer.loading.arrays import Array, Ragged, cast
from trainer.loading.cache import Arrays, cached_arrays, key_of
from trainer.loading.counter_random import below, random_bits
from trainer.loading.on_device import Movable
from trainer.loading.order import SampleKeys

EvaluationNegatives = Literal["parity", "unseen", "clean"]
NUM_EVALUATION_NEGATIVES = 100

_FORMAT_VERSION = 3
_LARGEST_SCALED_TIME = np.iinfo(np.int32).max
_TRAIN_STREAM, _VAL_STREAM, _TEST_STREAM = range(3)
_TRAIN_STEP, _EVALUATION_STEP, _SEEN_STEP = 8, 16, 128
"""Multiples to which training histories, evaluation histories and lists of seen items are padded on a GPU.

The multiples are larger for evaluation histories because their lengths vary more, and for seen items because they cost
little time.
"""


@dataclass(frozen=True)
class Negatives:
    """Number of negative items per training sample.

    num: negatives per position, or per user. per_position: whether negatives (B, T, num) are drawn for each position;
    otherwise, all positions of a user share negatives (B, num).
    """

    num: int
    per_position: bool


@dataclass(frozen=True)
class _Split:
    """Boundaries of each user's training, validation and test interactions.

    num_train, val_end: (num_users,) int64; a user's interactions [0, num_train) are for training, [num_train, val_end)
        for validation, and later ones for the test.
    items: training items of each user.
    scaled_times: (n,) int32, times in units of the shortest gap of the user's training items; None without times.
    shortest_gaps: (n,) int64, from the function `shortest_gaps`; None without times.
    """

    num_train: np.ndarray
    val_end: np.ndarray
    items: ItemSets
    scaled_times: np.ndarray | None
    shortest_gaps: np.ndarray | None


class TrainSequences(Movable):
    """Data set of training histories with at least two items; each item but the first is a target.

    users: (n,) int64, the user of each sample. A history with more than maxlen targets becomes one sample with the last
    maxlen targets or, with whole_histories, several samples that contain each target once, newest first.
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
        """Creates the data set. maxlen: largest number of inputs per sample."""
        self._num_users, self._items, self._times = interactions.num_users, interactions.items, split.scaled_times
        self._sets = split.items
        self._seed = seed
        self._negatives = negatives
        self._maxlen = maxlen
        num_samples = -(-np.maximum(split.num_train - 1, 0) // maxlen)
        self.users, sample = numbered(num_samples if whole_histories else np.minimum(num_samples, 1))
        stop = split.num_train[self.users] - sample * maxlen
        self._lengths = np.minimum(stop - 1, maxlen)
        self._first = interactions.offsets[self.users] + stop - 1 - self._lengths
        self._num_others = split.items.num_others(self.users)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def item_popularity(self) -> np.ndarray:
        """Share of users who have each item in training, (num_items + 1,) float64; 0 for padding."""
        return np.bincount(self._sets.items, minlength=self._sets.num_items + 1) / self._num_users

    def num_terms(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of targets of each sample, (B,) int64. index: (B,), sample indices."""
        return self._lengths[index]

    def weights(self, keys: SampleKeys) -> np.ndarray:
        return self._lengths[keys.index].astype(np.float32)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns training items as inputs, and the items one position later as targets.

        {"items": (B, T) int64; "targets": (B, T) int64; "length": (B,) int64; "times": (B, T) int32, scaled times from
        1, if there are times; "negatives", if requested: (B, T, num) int64, 0 where padded, or (B, num) int64}.
        Negatives are uniform among the items outside the user's training set.
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
        # counters are ordered by position, so that draws do not depend on the padding
        width = is_real.shape[1] if negatives.per_position else 1
        bits = random_bits(self._seed, epoch, index, width * negatives.num, _TRAIN_STREAM)
        items = self._sets.others(self.users.take(index), below(bits, self._num_others.take(index)))
        if not negatives.per_position:
            return items
        return items.reshape(len(index), width, negatives.num) * is_real[:, :, None]


@dataclass(frozen=True)
class _Candidates(Movable):
    """Draws a user's negatives for evaluation.

    excluded: items that are not drawn; all other items are equally likely. distinct: whether to draw without
    replacement.
    """

    excluded: ItemSets
    distinct: bool
    seed: int
    stream: int

    def draw(self, users: Array, turn: Array) -> Array:
        """Returns negatives (B, 100) int64 for users (B,). turn: (B,), index among the user's held-out items."""
        keys = users + turn * (len(self.excluded.offsets) - 1)
        bits = random_bits(self.seed, 0, keys, NUM_EVALUATION_NEGATIVES, self.stream)
        num_others = self.excluded.num_others(users)
        r = distinct_below(bits, num_others) if self.distinct else below(bits, num_others)
        return self.excluded.others(users, r)


class EvaluationSequences(Movable):
    """Data set of held-out items, each with negatives and a history: the user's earlier items, at least one.

    Samples are sorted by history length.

    users: (n,) int64, the user of each sample.
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
        """Creates the data set. is_test: whether targets are test items, not validation items."""
        self._items, self._times = interactions.items, interactions.times
        self._maxlen = maxlen
        self._candidates = candidates
        self._mask_seen = mask_seen
        num_interactions = np.diff(interactions.offsets)
        first, stop = (split.val_end, num_interactions) if is_test else (split.num_train, split.val_end)
        first = np.maximum(first, 1)  # a user's first interaction has no history
        users, turn = numbered(np.maximum(stop - first, 0))
        order = np.argsort(first[users] + turn, kind="stable")
        self.users, self._turn = users[order], turn[order]
        self._position = first[self.users] + self._turn
        self._first = interactions.offsets[self.users]
        gaps = split.shortest_gaps
        self._shortest_gap: Array = None if gaps is None else gaps[self._first + self._position - 1]

    def __len__(self) -> int:
        return len(self.users)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns the last maxlen items of each history, in time order, and the next item as target.

        {"items": (B, T) int64; "length": (B,) int64; "times": (B, T) int32, scaled times from 1, if there are times;
        "target": (B,) int64; "candidates": (B, 100) int64, the negatives; "seen", if requested: (B, S) int64, the whole
        history with 0 in place of the target}.
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
            origin, gap = self._times.take(start), self._shortest_gap.take(index)
            batch["times"] = scaled(rows.of(self._times), origin[:, None], gap[:, None]) * rows.is_real
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

    The history of a held-out item contains all earlier items of the user, including other held-out items.

    seed: seed of all negatives. Training negatives change in every epoch; the 100 negatives of a held-out item are
        fixed.
    maxlen: number of last items of a history that are used, at least 1.
    whole_histories: whether to train on whole histories, in samples of maxlen items.
    negatives: number of negatives of training samples; None: no negatives.
    eval_negatives: how evaluation negatives are drawn. "parity": with replacement, from items outside the user's
        training set, so negatives may include the validation item and the target, as in the published code of SASRec.
        "unseen": with replacement, from items outside the user's training, validation and (for the test) test sets, as
        in the published code of TiSASRec. "clean": 100 distinct items with which the user never interacts.
    mask_seen: whether evaluation batches contain "seen", the items of the history.

    Raises UserError if no history is left to train on, or if too few items are left as negatives for a user.
    """
    split = _load_split(interactions, cache_dir, hold_out)
    train = TrainSequences(
        interactions, split, maxlen=maxlen, whole_histories=whole_histories, seed=seed, negatives=negatives
    )
    if not len(train):
        raise UserError(
            f"{hold_out.flags}: leaves no user with two interactions for training; give more data, hold out less, or "
            "choose a smaller --k-core"
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
            f"{flag}: {wanted} of the {sets.num_items} items must be new to each user to serve as negatives, but a "
            f"user with {length:,} interactions leaves only {fewest}; remove such users, or give data with more items"
        )


def _load_split(interactions: Interactions, cache_dir: Path, hold_out: HoldOut) -> _Split:
    def build() -> Arrays:
        num_train, val_end = hold_out.bounds(interactions)
        users, position = numbered(np.diff(interactions.offsets))
        in_training = position < num_train[users]
        arrays = {"num_train": num_train, "val_end": val_end}
        arrays |= _item_sets(interactions, users, in_training).arrays
        if interactions.times is not None:
            arrays["shortest_gaps"] = gaps = shortest_gaps(interactions.offsets, interactions.times)
            first = interactions.offsets[users]
            gap = gaps[first + np.maximum(num_train[users], 1) - 1]
            arrays["scaled_times"] = scaled(interactions.times, interactions.times[first], gap)
        return arrays

    key = key_of("split", _FORMAT_VERSION, interactions.key, hold_out)
    arrays = cached_arrays(cache_dir, key, build)
    items = ItemSets(arrays["offsets"], arrays["items"], arrays["thresholds"], interactions.num_items)
    times = arrays.get("scaled_times"), arrays.get("shortest_gaps")
    return _Split(arrays["num_train"], arrays["val_end"], items, *times)


def _items_excluded(
    interactions: Interactions, split: _Split, eval_negatives: EvaluationNegatives, is_test: bool
) -> ItemSets:
    """Returns each user's items that are not drawn as negatives in validation or, if is_test, in the test."""
    if eval_negatives == "parity":
        return split.items
    users, position = numbered(np.diff(interactions.offsets))
    without_test = eval_negatives == "unseen" and not is_test
    return _item_sets(interactions, users, position < split.val_end[users] if without_test else position >= 0)


def _item_sets(interactions: Interactions, users: np.ndarray, chosen: np.ndarray) -> ItemSets:
    return ItemSets.of_pairs(users[chosen], interactions.items[chosen], interactions.num_users, interactions.num_items)


def shortest_gaps(offsets: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the shortest gap above 0 between a user's times up to each interaction: (n,) int64; 1 s without a gap."""
    _, position = numbered(np.diff(offsets))
    gaps = np.diff(times, prepend=times[:1])  # times may decrease between the files of a split
    shortest = np.where((position > 0) & (gaps > 0), gaps, np.iinfo(np.int64).max)
    shift = 1
    while shift <= position.max(initial=0):
        later = np.flatnonzero(position >= shift)
        shortest[later] = np.minimum(shortest[later], shortest[later - shift])
        shift *= 2
    return np.where(shortest == np.iinfo(np.int64).max, 1, shortest)


def scaled(times: Array, first: Array, gap: Array) -> Array:
    """Returns times since a user's first time, divided by a gap and rounded, plus 1: int32.

    Li, Wang and McAuley, "Time interval aware self-attention for sequential recommendation", WSDM 2020.
    """
    return cast(((cast(times - first, "float64") / gap).round() + 1).clip(1, _LARGEST_SCALED_TIME), "int32")
