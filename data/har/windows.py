"""Windows of inertial signals, and whose are trained on, held out or tested on."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.har.augmentation import Augmentation, WindowAugmenter
from trainer.loading.errors import BadInput
from trainer.loading.order import SampleKeys

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""The nine channels: acceleration without gravity (g), angular velocity (rad/s), acceleration with gravity (g)."""
CLASSES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
WINDOW_LENGTH = 128
SAMPLE_RATE_HZ = 50


@dataclass(frozen=True)
class HarRecordings:
    """Windows in physical units, as recorded.

    signals: (N, 9, 128) float32, channels as in SIGNALS.
    labels: (N,) int64, 0..5, positions in CLASSES.
    subjects: (N,) int64, the person who wore the phone.
    is_test: (N,) bool, the person belongs to the test part.
    """

    signals: np.ndarray
    labels: np.ndarray
    subjects: np.ndarray
    is_test: np.ndarray


class HarDataset:
    """Windows of some people in physical units, in memory that processes share."""

    def __init__(self, recordings: HarRecordings, rows: np.ndarray) -> None:
        """rows: (n,) int64, which windows of the recordings."""
        self._signals = recordings.signals
        self._rows = rows
        self._augment: WindowAugmenter | None = None
        self.labels = recordings.labels[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """{"signals": (n, 9, 128) float32, "label": (n,) int64}."""
        signals = self._signals.take(self._rows.take(keys.index), axis=0)
        if self._augment is not None:
            signals = self._augment(signals, keys.epoch, keys.index)
        return {"signals": signals, "label": self.labels[keys.index]}

    def augmented(self, strength: Augmentation, seed: int) -> "HarDataset":
        """The same windows, changed at random."""
        varied = copy.copy(self)
        varied._augment = WindowAugmenter(strength, self.statistics[1], seed)
        return varied

    @cached_property
    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel over the windows as recorded, (9,) float64 each."""
        signals = self._signals[self._rows]
        std = signals.std(axis=(0, 2), dtype=np.float64)
        std[std == 0] = 1.0  # a dead channel stays at zero
        return signals.mean(axis=(0, 2), dtype=np.float64), std


class FeaturedDataset:
    """A HarDataset whose samples carry features that were computed beforehand."""

    def __init__(self, dataset: HarDataset, features: np.ndarray) -> None:
        """features: (len(dataset), ...) float32."""
        self._dataset = dataset
        self._features = features

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        """What the data set gives, and {"features": (n, ...) float32}."""
        return {**self._dataset.__getitems__(keys), "features": self._features[keys.index]}


def split_by_subject(
    recordings: HarRecordings,
    seed: int,
    val_subjects: Sequence[int],
    augmentation: Augmentation | None = None,
) -> dict[str, HarDataset]:
    """The data sets "train", "val" and "test", without a person in two of them; no "val" where nobody is held out.

    Neighbouring windows overlap, so validation on random windows would be validation on training data.

    seed: the key of the augmentation. val_subjects: some of `training_subjects`.
    augmentation: of "train"; None for none.
    """
    is_val = np.isin(recordings.subjects, val_subjects) & ~recordings.is_test
    rows = {"train": ~is_val & ~recordings.is_test, "val": is_val, "test": recordings.is_test}
    splits = {name: HarDataset(recordings, np.flatnonzero(chosen)) for name, chosen in rows.items() if chosen.any()}
    if augmentation is not None:
        splits["train"] = splits["train"].augmented(augmentation, seed)
    return splits


def training_subjects(recordings: HarRecordings) -> list[int]:
    """The people of the training part, in order."""
    subjects: list[int] = np.unique(recordings.subjects[~recordings.is_test]).tolist()
    return subjects


def rotated_subjects(recordings: HarRecordings, seed: int, num_val_subjects: int) -> list[int]:
    """Who is held out with this seed: training subject number seed * num_val_subjects and the next ones, in a circle.

    Raises BadInput when nobody would be left to train on.
    """
    candidates = training_subjects(recordings)
    if not 0 < num_val_subjects < len(candidates):
        raise BadInput(
            f"--num-val-subjects {num_val_subjects}: must be at least 1 and leave one of the "
            f"{len(candidates)} training subjects to train on"
        )
    first = seed * num_val_subjects
    return sorted(candidates[(first + i) % len(candidates)] for i in range(num_val_subjects))


def named_subjects(recordings: HarRecordings, names: Sequence[int]) -> list[int]:
    """The people of `--val-subjects`, in order. Raises BadInput for a stranger, and when nobody is left."""
    candidates = training_subjects(recordings)
    held_out = sorted(set(names))
    for subject in held_out:
        if subject not in candidates:
            known = " ".join(map(str, candidates))
            raise BadInput(f"--val-subjects {subject}: not a training subject; those are {known}")
    if not 0 < len(held_out) < len(candidates):
        raise BadInput(
            f"--val-subjects: {len(held_out)} of {len(candidates)} training subjects are held out; "
            "hold out at least one and leave one to train on"
        )
    return held_out


def subject_folds(recordings: HarRecordings, num_folds: int) -> list[list[int]]:
    """The training subjects dealt out to the folds in turn. Raises BadInput for more folds than people."""
    candidates = training_subjects(recordings)
    if not 2 <= num_folds <= len(candidates):
        raise BadInput(f"--folds {num_folds}: must be 2 to {len(candidates)}, the number of training subjects")
    return [candidates[i::num_folds] for i in range(num_folds)]
