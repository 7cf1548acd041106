"""Tests the random augmentation of windows against slow references."""

import numpy as np
import pytest

from data.har.augmentation import Augmentation, WindowAugmenter, at_tempo, rotation_matrices
from data.har.windows import HarRecordings, split_by_subject
from tests.data.har.test_windows import everything, keys
from trainer.loading.counter_random import normal, uniform
from trainer.loading.order import SampleKeys


def random_recordings() -> HarRecordings:
    rng = np.random.default_rng(0)
    signals = rng.normal(size=(40, 9, 128)) * rng.uniform(0.2, 3, (9, 1)) + rng.normal(size=(9, 1))
    return HarRecordings(
        signals.astype(np.float32), np.arange(40) % 6, np.repeat(np.arange(4), 10), np.arange(40) >= 30
    )


def test_augmentation_equals_a_slow_obvious_reference() -> None:
    recordings = random_recordings()
    strength = Augmentation(max_rotation_deg=20.0, scale_std=0.2, tempo_spread=0.0, jitter_std=0.1)
    seed, epoch, index = 1, 3, np.array([4, 0, 17])
    splits = split_by_subject(recordings, seed, [2], strength)
    augmented = splits["train"].__getitems__(SampleKeys(index, epoch))["signals"]
    raw = recordings.signals[:20].astype(np.float64)
    std = raw.std(axis=(0, 2))
    for row, i in enumerate(index):
        one = np.array([i])
        angle = np.deg2rad(20.0) * (2 * uniform(seed, epoch, one, (), stream=0)[0] - 1)
        draws = normal(seed, epoch, one, (12,), stream=1)[0].astype(np.float64)
        noise = normal(seed, epoch, one, (9, 128), stream=2)[0]
        axis = draws[:3] / np.linalg.norm(draws[:3])
        for triplet in range(3):
            for t in range(128):
                v = raw[i, 3 * triplet : 3 * triplet + 3, t]
                turned = v * np.cos(angle) + np.cross(axis, v) * np.sin(angle) + axis * (axis @ v) * (1 - np.cos(angle))
                for j in range(3):
                    c = 3 * triplet + j
                    scaled = turned[j] * (1 + 0.2 * draws[3 + c])
                    expected = scaled + 0.1 * std[c] * noise[c, t]
                    assert augmented[row, c, t] == pytest.approx(expected, abs=2e-5)


def test_rotation_preserves_norms_of_physical_vectors() -> None:
    recordings = random_recordings()
    augment = WindowAugmenter(Augmentation(45.0, 0.0, 0.0, 0.0), np.ones(9), seed=0)
    raw = augment(recordings.signals, 0, np.arange(40))
    before = np.linalg.norm(recordings.signals.reshape(40, 3, 3, 128), axis=2)
    after = np.linalg.norm(raw.reshape(40, 3, 3, 128), axis=2)
    np.testing.assert_allclose(after, before, rtol=1e-4)
    assert np.abs(raw - recordings.signals).max() > 0.1


def test_tempo_equals_interpolation_one_by_one() -> None:
    rng = np.random.default_rng(0)
    signals = rng.normal(size=(4, 2, 128)).astype(np.float32)
    factors = np.array([1.0, 1.15, 0.85, 2.0], np.float32)
    played = at_tempo(signals, factors)
    for window, factor, result in zip(signals, factors, played, strict=True):
        times = (np.arange(128) - 63.5) * float(factor) + 63.5
        for channel, values in zip(window, result, strict=True):
            np.testing.assert_allclose(values, np.interp(times, np.arange(128), channel), atol=1e-4)
    np.testing.assert_allclose(played[0], signals[0], atol=1e-6)


def test_tempos_cover_their_range() -> None:
    """The slope of an augmented ramp is its tempo."""
    ramp = np.tile(np.arange(128, dtype=np.float32), (2000, 9, 1))
    augment = WindowAugmenter(Augmentation(0.0, 0.0, 0.15, 0.0), np.ones(9), seed=0)
    slopes = np.diff(augment(ramp, 0, np.arange(2000))[:, :, 60:68], axis=2)
    np.testing.assert_allclose(slopes, slopes[:, :1, :1] * np.ones_like(slopes), rtol=1e-3)
    assert 0.849 < slopes.min() < 0.853 and 1.147 < slopes.max() < 1.151
    assert slopes.mean() == pytest.approx(1.0, abs=0.01)


def test_rotation_angles_are_bounded_and_axes_are_uniform() -> None:
    augment = WindowAugmenter(Augmentation(15.0, 0.0, 0.0, 0.0), np.ones(9), seed=0)
    turns = augment.linear_maps(0, np.arange(2000))[0][:, 0].astype(np.float64)
    angles = np.rad2deg(np.arccos(np.clip((np.trace(turns, axis1=1, axis2=2) - 1) / 2, -1, 1)))
    assert 14.5 < angles.max() < 15.01
    assert np.mean(angles) == pytest.approx(7.5, abs=0.5)
    axes = np.stack([turns[:, 2, 1] - turns[:, 1, 2], turns[:, 0, 2] - turns[:, 2, 0]], axis=1)
    assert np.abs(np.mean(np.sign(axes), axis=0)).max() < 0.1


def test_rotation_matrices_are_rotations() -> None:
    rng = np.random.default_rng(0)
    turns = rotation_matrices(rng.normal(size=(50, 3)), rng.uniform(-3, 3, 50))
    np.testing.assert_allclose(turns @ turns.swapaxes(1, 2), np.broadcast_to(np.eye(3), (50, 3, 3)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(turns), 1.0)
    quarter = rotation_matrices(np.array([[0.0, 0.0, 2.0]]), np.array([np.pi / 2]))
    np.testing.assert_allclose(quarter[0] @ [1, 0, 0], [0, 1, 0], atol=1e-12)


def test_augmentation_depends_on_epoch_and_sample_not_on_the_batch(recordings) -> None:
    splits = split_by_subject(recordings, 0, [1], Augmentation(15.0, 0.1, 0.1, 0.05))
    train = splits["train"]
    together = train.__getitems__(keys(2, 0, 3, epoch=1))["signals"]
    for row, i in enumerate([2, 0, 3]):
        alone = train.__getitems__(keys(i, epoch=1))["signals"][0]
        assert np.array_equal(alone, together[row])
    assert not np.allclose(train.__getitems__(keys(2, epoch=2))["signals"][0], together[0])
    plain = split_by_subject(recordings, 0, [1])
    for name in ("val", "test"):
        assert np.array_equal(everything(splits[name])["signals"], everything(plain[name])["signals"])


def test_no_augmentation_and_zero_augmentation_change_nothing(recordings) -> None:
    plain = split_by_subject(recordings, 0, [1])["train"]
    zero = split_by_subject(recordings, 0, [1], Augmentation(0.0, 0.0, 0.0, 0.0))
    batch = plain.__getitems__(keys(0, 1))["signals"]
    assert np.array_equal(batch, recordings.signals[recordings.subjects != 1][:2]) and batch.flags.writeable
    np.testing.assert_allclose(zero["train"].__getitems__(keys(0, 1))["signals"], batch, atol=1e-5)
