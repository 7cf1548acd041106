"""Windows of wearable sensors' signals, and splits of the windows by person."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from data.har.augmentation import Augmentation, WindowAugmenter
from trainer.common.errors import UserError
from trainer.loading.arrays import Array, rows
from trainer.loading.cache import Arrays
from trainer.loading.on_device import Movable
from trainer.loading.order import SampleKeys

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""UCI HAR's channels: acceleration without gravity (g), angular velocity (rad/s), acceleration with gravity (g)."""
CLASSES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
WINDOW_LENGTH = 128
SAMPLE_RATE_HZ = 50


@dataclass(frozen=True)
class WindowFormat:
    """Format of windows; the defaults are UCI HAR's.

    channels, classes: names. length: rows (time steps) of a window. hop: rows between the starts of consecutive
    windows. rate_hz: rows per second.
    """

    channels: tuple[str, ...] = SIGNALS
    classes: tuple[str, ...] = CLASSES
    length: int = WINDOW_LENGTH
    hop: int = WINDOW_LENGTH // 2
    rate_hz: float = SAMPLE_RATE_HZ


@dataclass(frozen=True)
class HarRecordings:
    """Windows of sensor signals in physical units.

    signals: (N, C, T) float32.
    labels: (N,) int64, indices into `classes`.
    subjects: (N,) int64, number of each window's wearer, or index into `subject_names`.
    is_test: (N,) bool, whether the wearer belongs to the test set.
    channels, classes: names; the defaults are UCI HAR's.
    subject_names: names of the wearers; () if their numbers serve as names.
    """

    signals: np.ndarray
    labels: np.ndarray
    subjects: np.ndarray
    is_test: np.ndarray
    channels: tuple[str, ...] = SIGNALS
    classes: tuple[str, ...] = CLASSES
    subject_names: tuple[str, ...] = ()

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> "HarRecordings":
        """Builds recordings with UCI HAR's channels and classes from arrays signals, labels, subjects and is_test."""
        return cls(arrays["signals"], arrays["labels"], arrays["subjects"], arrays["is_test"])

    def name_of(self, subject: int) -> str:
        return self.subject_names[subject] if self.subject_names else str(subject)


def triplets_first(names: Sequence[str]) -> tuple[list[str], int]:
    """Sorts channels so that triplets (x, y and z of a sensor) come first; also returns the number of triplets.

    The names of a triplet differ only in the last letter: acc_x, acc_y, acc_z.
    """
    triplets = [
        [f"{name[:-1]}{axis}" for axis in (name[-1], chr(ord(name[-1]) + 1), chr(ord(name[-1]) + 2))]
        for name in names
        if name[-1] in "xX"
    ]
    triplets = [triplet for triplet in triplets if all(name in names for name in triplet)]
    first = [name for triplet in triplets for name in triplet]
    return [*first, *(name for name in names if name not in first)], len(triplets)


class HarDataset(Movable):
    """Data set of selected windows of sensor signals, in physical units."""

    rows_alike = True

    def __init__(self, recordings: HarRecordings, rows: np.ndarray) -> None:
        """Creates the data set. rows: (n,) int64, indices of the selected windows in the recordings."""
        self._signals = recordings.signals
        self._num_triplets = triplets_first(recordings.channels)[1]
        self.rows = rows
        self._augment: WindowAugmenter | None = None
        self.labels = recordings.labels[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns {"signals": (n, C, T) float32, "label": (n,) int64}."""
        index = self.here(keys.index)
        signals = rows(self._signals, rows(self.rows, index))
        if self._augment is not None:
            signals = self._augment(signals, keys.epoch, index)
        return {"signals": signals, "label": rows(self.labels, index)}

    def augmented(self, strength: Augmentation, seed: int) -> "HarDataset":
        varied = copy.copy(self)
        varied._augment = WindowAugmenter(strength, self.statistics[1], seed, self._num_triplets)
        return varied

    @property
    def recorded(self) -> np.ndarray:
        """Windows without augmentation, (n, C, T) float32."""
        return self._signals[self.rows]

    @cached_property
    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel over the windows without augmentation, (C,) float64 each."""
        signals = self.recorded
        std = signals.std(axis=(0, 2), dtype=np.float64)
        std[std == 0] = 1.0  # so that normalising sets a constant channel to zero
        return signals.mean(axis=(0, 2), dtype=np.float64), std


class FeaturedDataset(Movable):
    """Data set that adds precomputed features to a HarDataset."""

    rows_alike = True

    def __init__(self, dataset: HarDataset, features: np.ndarray) -> None:
        """Creates the data set. features: (len(dataset), ...) float32."""
        self._dataset = dataset
        self._features = features

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns {"features": (n, ...) float32} and the entries of the HarDataset."""
        return {**self._dataset.__getitems__(keys), "features": rows(self._features, self.here(keys.index))}


def split_by_subject(
    recordings: HarRecordings,
    seed: int,
    val_subjects: Sequence[int],
    augmentation: Augmentation | None = None,
) -> dict[str, HarDataset]:
    """Builds data sets "train", "val" and "test" with different people; without `val_subjects`, "val" is absent.

    Consecutive windows overlap, so a split of random windows would leak training data into validation.

    seed: seed of the augmentation. val_subjects: subset of `training_subjects`.
    augmentation: changes to training windows.
    """
    is_val = np.isin(recordings.subjects, val_subjects) & ~recordings.is_test
    rows = {"train": ~is_val & ~recordings.is_test, "val": is_val, "test": recordings.is_test}
    splits = {name: HarDataset(recordings, np.flatnonzero(chosen)) for name, chosen in rows.items() if chosen.any()}
    if augmentation is not None:
        splits["train"] = splits["train"].augmented(augmentation, seed)
    return splits


def with_test_subjects(recordings: HarRecordings, names: Sequence[str] | None) -> HarRecordings:
    """Chooses the people in the test set. Raises UserError for unknown names, and if nobody is left to train on.

    names: people in the test set; None: every fifth person or, with fewer than five people, the last one.
    """
    known = [recordings.name_of(subject) for subject in np.unique(recordings.subjects)]
    if names is None:
        names = known[4::5] or known[-1:]
    if strangers := [name for name in names if name not in known]:
        raise UserError(f"--test-subjects {' '.join(strangers)}: no such subjects; the subjects are {' '.join(known)}")
    if len(known) < 2:
        raise UserError(
            f"--data-dir: {known[0]} is the only subject, but the test set needs another subject; give "
            "recordings of at least two people"
        )
    if len(set(names)) >= len(known):
        raise UserError(
            f"--test-subjects {' '.join(names)}: leaves none of the {len(known)} subjects for training; hold out fewer"
        )
    tested = [subject for subject in np.unique(recordings.subjects) if recordings.name_of(subject) in names]
    return replace(recordings, is_test=np.isin(recordings.subjects, tested))


def training_subjects(recordings: HarRecordings) -> list[int]:
    """Returns the sorted numbers of the people who are not in the test set."""
    subjects: list[int] = np.unique(recordings.subjects[~recordings.is_test]).tolist()
    return subjects


def rotated_subjects(recordings: HarRecordings, seed: int, num_val_subjects: int) -> list[int]:
    """Returns the validation subjects for a seed: num_val_subjects consecutive ones of the n training subjects.

    The selection starts at index seed * num_val_subjects modulo n, and wraps around. Raises UserError unless
    0 < num_val_subjects < n.
    """
    candidates = training_subjects(recordings)
    if len(candidates) == 1:
        raise UserError(
            f"--data-dir: {recordings.name_of(candidates[0])} is the only subject outside the test set, but training "
            "and validation need a subject each; hold out fewer with --test-subjects, give recordings of at least "
            "three people, or skip validation with --refit"
        )
    if not 0 < num_val_subjects < len(candidates):
        raise UserError(
            f"--num-val-subjects {num_val_subjects}: must be at least 1 and less than {len(candidates)}, the number "
            "of training subjects"
        )
    first = seed * num_val_subjects
    return sorted(candidates[(first + i) % len(candidates)] for i in range(num_val_subjects))


def named_subjects(recordings: HarRecordings, names: Sequence[str]) -> list[int]:
    """Returns the sorted numbers of the people with these names.

    Raises UserError for unknown names, or if nobody is left to train on.
    """
    candidates = {recordings.name_of(subject): subject for subject in training_subjects(recordings)}
    if strangers := [name for name in names if name not in candidates]:
        raise UserError(
            f"--val-subjects {' '.join(strangers)}: no such training subjects; the training subjects are "
            f"{' '.join(candidates)}"
        )
    held_out = sorted({candidates[name] for name in names})
    if not 0 < len(held_out) < len(candidates):
        raise UserError(
            f"--val-subjects: holds out {len(held_out)} of {len(candidates)} training subjects; hold out at least "
            "one, and leave one for training"
        )
    return held_out


def subject_folds(recordings: HarRecordings, num_folds: int) -> list[list[str]]:
    """Assigns names of training subjects to folds in rotation. Raises UserError for more folds than subjects."""
    candidates = [recordings.name_of(subject) for subject in training_subjects(recordings)]
    if not 2 <= num_folds <= len(candidates):
        raise UserError(f"--folds {num_folds}: must be from 2 to {len(candidates)}, the number of training subjects")
    return [candidates[i::num_folds] for i in range(num_folds)]
