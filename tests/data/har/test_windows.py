"""Tests the split of windows by subject, and their statistics."""

from itertools import chain

import numpy as np
import pytest
import torch

from data.har.augmentation import Augmentation
from data.har.windows import (
    HarDataset,
    HarRecordings,
    named_subjects,
    rotated_subjects,
    split_by_subject,
    subject_folds,
)
from tests.helpers.uci_har_files import raw_windows
from trainer.common.errors import UserError
from trainer.loading.on_device import moved
from trainer.loading.order import SampleKeys


def keys(*index: int, epoch: int = 0) -> SampleKeys:
    return SampleKeys(np.array(index), epoch)


def everything(dataset: HarDataset) -> dict[str, np.ndarray]:
    return dataset.__getitems__(keys(*range(len(dataset))))


def test_splits_contain_their_subjects_and_statistics_only_training_windows(recordings) -> None:
    splits = split_by_subject(recordings, seed=0, val_subjects=[3])
    raw = np.concatenate([raw_windows("train"), raw_windows("test")])
    rows = {"train": [0, 1, 4, 5], "val": [2, 3], "test": [6, 7, 8]}
    for name, expected in rows.items():
        samples = everything(splits[name])
        np.testing.assert_allclose(samples["signals"], raw[expected], rtol=1e-6)
        assert samples["label"].tolist() == recordings.labels[expected].tolist()
        assert samples["signals"].dtype == np.float32 and samples["label"].dtype == np.int64
    mean, std = splits["train"].statistics
    np.testing.assert_allclose(mean, raw[rows["train"]].mean(axis=(0, 2)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(std, raw[rows["train"]].std(axis=(0, 2)), rtol=1e-5)


def test_statistics_come_from_unaugmented_windows(recordings) -> None:
    plain = split_by_subject(recordings, 0, [3])["train"].statistics
    augmented = split_by_subject(recordings, 0, [3], Augmentation(0.0, 0.0, 0.0, 5.0))["train"].statistics
    assert all(np.array_equal(a, b) for a, b in zip(plain, augmented, strict=True))


def test_a_constant_channel_has_deviation_1(recordings) -> None:
    signals = recordings.signals.copy()
    signals[:, 4] = 0.25
    dead = HarRecordings(signals, recordings.labels, recordings.subjects, recordings.is_test)
    mean, std = split_by_subject(dead, 0, [1])["train"].statistics
    assert (mean[4], std[4]) == (0.25, 1.0) and (std > 0).all()


def windows_of(dataset: HarDataset) -> set[bytes]:
    return {window.tobytes() for window in everything(dataset)["signals"]}


def test_rotating_splits_by_seed_holds_everyone_out_once(recordings) -> None:
    held_out: set[bytes] = set()
    for seed in range(2):
        splits = split_by_subject(recordings, seed, rotated_subjects(recordings, seed, 2))
        parts = {name: windows_of(dataset) for name, dataset in splits.items()}
        assert sum(len(part) for part in parts.values()) == len(set().union(*parts.values())) == 9
        assert len(parts["test"]) == 3
        held_out |= parts["val"]
    assert len(held_out) == 6


def test_folds_hold_everyone_out_once(recordings) -> None:
    for num_folds in (2, 3, 4):
        folds = subject_folds(recordings, num_folds)
        assert len(folds) == num_folds and sorted(chain(*folds)) == ["1", "3", "5", "6"]
        assert max(map(len, folds)) - min(map(len, folds)) <= 1


def test_holding_out_nobody_trains_on_everyone(recordings) -> None:
    splits = split_by_subject(recordings, 0, [])
    assert splits.keys() == {"train", "test"} and len(splits["train"]) == 6


def test_impossible_choices_of_subjects_are_refused(recordings) -> None:
    for val_subjects, message in {
        ("99",): "--val-subjects 99: no such training subjects; the training subjects are 1 3 5 6",
        ("2",): "--val-subjects 2: no such training subjects",
        ("1", "3", "5", "6"): "--val-subjects: holds out 4 of 4 training subjects",
        (): "--val-subjects: holds out 0 of 4 training subjects",
    }.items():
        with pytest.raises(UserError, match=message):
            named_subjects(recordings, val_subjects)
    for num_val_subjects in (0, 4, 5):
        with pytest.raises(UserError, match=f"--num-val-subjects {num_val_subjects}: .*less than 4, the number of"):
            rotated_subjects(recordings, 0, num_val_subjects)
    for num_folds in (1, 5):
        with pytest.raises(UserError, match=f"--folds {num_folds}: must be from 2 to 4"):
            subject_folds(recordings, num_folds)


def test_windows_on_a_device_are_varied_as_on_the_host(recordings) -> None:
    splits = split_by_subject(recordings, 0, [3], Augmentation(15.0, 0.1, 0.1, 0.05))
    there = moved(list(splits.values()), torch.device("cpu"))
    for own, dataset in zip(splits.values(), there, strict=True):
        every = keys(*range(len(own)), epoch=3)
        expected, found = own.__getitems__(every), dataset.__getitems__(every)
        assert np.array_equal(found["label"].numpy(), expected["label"])
        assert found["signals"].dtype == torch.float32
        np.testing.assert_allclose(found["signals"].numpy(), expected["signals"], rtol=0, atol=1e-5)
    assert there[0]._signals is there[1]._signals
