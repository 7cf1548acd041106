"""Synthetic inertial recordings in the shape of UCI HAR, from a small physical model; needs no download.

A person moves in bouts. The body accelerates and turns with the harmonics of the stride, or sways; posture directs
gravity; everyone wears the phone at the waist slightly differently; sensors add noise and a bias. People differ more
from each other than walking from climbing stairs, so only features that carry over to other people help: the mix of
harmonics and their phases, invisible to linear functions of a window.

Body frame: x up, y left, z forward. A phone that hangs straight measures in this frame.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.har.augmentation import rotation_matrices
from data.har.windows import CLASSES, SAMPLE_RATE_HZ, WINDOW_LENGTH, HarRecordings
from trainer.loading.cache import Arrays, cached_arrays

TEST_SUBJECTS = (2, 4, 9, 10, 12, 13, 18, 20, 24)
"""The official test part of UCI HAR; the other subjects of 1..30 are for training."""

_NUM_SUBJECTS = 30
_BOUTS_PER_ACTIVITY = 2
_WINDOWS_PER_BOUT = 14
VERSION = 2
"""Version of the generator, for the cache."""


@dataclass(frozen=True)
class _Gait:
    """Typical motion of a gait.

    stride_hz: strides (two steps) per second.
    acc: (3, 5) complex, amplitude in g and phase of the stride's harmonics 1..5, for up, left and forward.
    gyro: (3, 5) complex, the same in rad/s, about these axes.
    """

    stride_hz: float
    acc: np.ndarray
    gyro: np.ndarray


@dataclass(frozen=True)
class _Posture:
    """Direction of gravity and sway of a resting body.

    pitch_deg, pitch_spread_deg: backward lean, its mean and standard deviation over bouts.
    sway_g: standard deviation of the sway.
    """

    pitch_deg: float
    pitch_spread_deg: float
    sway_g: float


def _polar(amplitudes: list[list[float]], phases: list[list[float]]) -> np.ndarray:
    return np.array(amplitudes) * np.exp(1j * np.array(phases))


# A step is half a stride: even harmonics carry up and forward, odd ones the sideways swing. Going down lands hard
_GAITS = {
    "WALKING": _Gait(
        0.95,
        _polar(
            [[0.04, 0.26, 0.03, 0.09, 0.02], [0.10, 0.05, 0.07, 0.03, 0.04], [0.03, 0.16, 0.03, 0.07, 0.02]],
            [[0.0, 0.0, 0.5, 1.2, 0.0], [0.3, 1.0, 2.0, 0.0, 1.0], [0.0, 1.6, 0.0, 2.6, 0.0]],
        ),
        _polar(
            [[0.35, 0.10, 0.15, 0.06, 0.05], [0.08, 0.30, 0.06, 0.15, 0.04], [0.25, 0.08, 0.12, 0.05, 0.05]],
            [[0.0, 0.5, 1.0, 0.0, 0.0], [0.0, 0.8, 0.0, 2.0, 0.0], [1.0, 0.0, 2.2, 0.0, 0.0]],
        ),
    ),
    "WALKING_UPSTAIRS": _Gait(
        0.86,
        _polar(
            [[0.06, 0.22, 0.04, 0.06, 0.02], [0.11, 0.05, 0.06, 0.03, 0.03], [0.04, 0.17, 0.04, 0.05, 0.02]],
            [[0.0, 0.0, 0.5, 2.2, 0.0], [0.3, 1.0, 1.2, 0.0, 1.0], [0.0, 2.3, 0.0, 0.6, 0.0]],
        ),
        _polar(
            [[0.35, 0.10, 0.12, 0.06, 0.05], [0.10, 0.38, 0.06, 0.11, 0.04], [0.27, 0.08, 0.10, 0.05, 0.05]],
            [[0.0, 0.5, 1.6, 0.0, 0.0], [0.0, 1.5, 0.0, 0.9, 0.0], [1.4, 0.0, 2.2, 0.0, 0.0]],
        ),
    ),
    "WALKING_DOWNSTAIRS": _Gait(
        0.98,
        _polar(
            [[0.05, 0.28, 0.04, 0.15, 0.04], [0.11, 0.06, 0.08, 0.04, 0.05], [0.04, 0.15, 0.04, 0.10, 0.03]],
            [[0.0, 0.0, 0.5, 0.4, 0.0], [0.3, 1.0, 2.6, 0.0, 1.0], [0.0, 1.0, 0.0, 3.2, 0.0]],
        ),
        _polar(
            [[0.38, 0.12, 0.18, 0.08, 0.06], [0.09, 0.28, 0.07, 0.20, 0.05], [0.27, 0.09, 0.15, 0.06, 0.06]],
            [[0.0, 0.5, 0.4, 0.0, 0.0], [0.0, 0.3, 0.0, 2.8, 0.0], [0.6, 0.0, 2.2, 0.0, 0.0]],
        ),
    ),
}
_POSTURES = {
    "WALKING": _Posture(0.0, 4.0, 0.02),
    "WALKING_UPSTAIRS": _Posture(-3.0, 4.0, 0.02),
    "WALKING_DOWNSTAIRS": _Posture(2.0, 4.0, 0.02),
    "SITTING": _Posture(28.0, 5.0, 0.004),
    "STANDING": _Posture(0.0, 4.0, 0.007),
    "LAYING": _Posture(85.0, 8.0, 0.003),
}
_HARMONICS = np.arange(1, 6)


def load_synthetic_har(cache_dir: Path, seed: int = 0) -> HarRecordings:
    """Generates 5,040 windows of 30 subjects, a function of the seed; cached."""
    key = f"har_synthetic-{VERSION}-{seed}"
    return HarRecordings.of_arrays(cached_arrays(cache_dir, key, lambda: generate(seed)))


def generate(seed: int) -> Arrays:
    """Returns the fields of HarRecordings, training subjects first."""
    subjects = sorted(range(1, _NUM_SUBJECTS + 1), key=lambda subject: (subject in TEST_SUBJECTS, subject))
    signals = np.concatenate([_person(seed, subject) for subject in subjects])
    num_windows = len(signals) // _NUM_SUBJECTS
    of_window = np.repeat(subjects, num_windows)
    labels = np.repeat(np.arange(len(CLASSES)), _BOUTS_PER_ACTIVITY * _WINDOWS_PER_BOUT)
    return {
        "signals": signals.astype(np.float32),
        "labels": np.tile(labels, _NUM_SUBJECTS),
        "subjects": of_window,
        "is_test": np.isin(of_window, TEST_SUBJECTS),
    }


def _person(seed: int, subject: int) -> np.ndarray:
    """Generates all windows of a person, by activity: (n, 9, 128)."""
    rng = np.random.default_rng([seed, subject])
    mounting = _random_rotation(rng, spread_deg=6.0)
    gaits = _personal_gaits(rng)
    bouts = [
        _windows(_bout(rng, activity, gaits.get(activity), mounting))
        for activity in CLASSES
        for _ in range(_BOUTS_PER_ACTIVITY)
    ]
    return np.concatenate(bouts)


def _personal_gaits(rng: np.random.Generator) -> dict[str, _Gait]:
    """Draws a person's gaits, which share tempo, vigour and the weight of each harmonic."""
    tempo = np.exp(0.08 * rng.standard_normal())
    vigour = np.exp(0.25 * rng.standard_normal())
    style = {
        name: np.exp(0.15 * rng.standard_normal((3, 5)) + 0.3j * rng.standard_normal((3, 5)))
        for name in ("acc", "gyro")
    }
    return {
        activity: _Gait(
            gait.stride_hz * tempo * np.exp(0.03 * rng.standard_normal()),
            gait.acc * vigour * style["acc"],
            gait.gyro * vigour * style["gyro"],
        )
        for activity, gait in _GAITS.items()
    }


def _bout(rng: np.random.Generator, activity: str, gait: _Gait | None, mounting: np.ndarray) -> np.ndarray:
    """Generates one uninterrupted stretch of an activity, as the phone records it: (9, T).

    It starts and ends standing upright: over about a second posture and motion fade in, and out again.
    """
    num_samples = (_WINDOWS_PER_BOUT + 1) * WINDOW_LENGTH // 2
    presence = _fade_in_and_out(rng, num_samples)
    posture = _POSTURES[activity]
    pitch = np.deg2rad(rng.normal(posture.pitch_deg, posture.pitch_spread_deg)) * presence
    roll = np.deg2rad(rng.normal(0.0, 4.0)) * presence
    gravity = np.stack([np.cos(pitch) * np.cos(roll), np.sin(roll), np.sin(pitch) * np.cos(roll)])
    acc, gyro = (sway * _slow_noise(rng, 3, num_samples) for sway in (posture.sway_g, 2 * posture.sway_g))
    if gait is not None:
        rhythm = _rhythm(rng, gait.stride_hz, num_samples)
        acc = acc + presence * (gait.acc @ rhythm).real
        gyro = gyro + presence * (gait.gyro @ rhythm).real
    # A change of posture is itself an angular velocity about the left axis.
    gyro[1] += np.gradient(pitch) * SAMPLE_RATE_HZ
    phone = _random_rotation(rng, spread_deg=3.0) @ mounting
    acc_bias, gyro_bias = 0.01 * rng.standard_normal((2, 3, 1))
    body_acc = phone @ acc + acc_bias + 0.064 * rng.standard_normal((3, num_samples))
    body_gyro = phone @ gyro + gyro_bias + 0.12 * rng.standard_normal((3, num_samples))
    return np.concatenate([body_acc, body_gyro, body_acc + phone @ gravity])


def _rhythm(rng: np.random.Generator, stride_hz: float, num_samples: int) -> np.ndarray:
    """Returns exp(i k phase(t)) for the harmonics k, (5, T): a stride with slightly varying tempo and size."""
    tempo_wander, size_wander = _slow_noise(rng, 2, num_samples)
    tempo = stride_hz * (1 + 0.04 * tempo_wander)
    phase = rng.uniform(0, 2 * np.pi) + 2 * np.pi * np.cumsum(tempo) / SAMPLE_RATE_HZ
    return (1 + 0.12 * size_wander) * np.exp(1j * _HARMONICS[:, None] * phase)


def _fade_in_and_out(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Rises smoothly from 0 to 1 and falls again, each within 0.5 to 1.5 s: (T,)."""
    rise, fall = SAMPLE_RATE_HZ * rng.uniform(0.5, 1.5, 2)
    time = np.arange(num_samples)
    nearest_end = np.clip(np.minimum(time / rise, (num_samples - 1 - time) / fall), 0.0, 1.0)
    return 0.5 - 0.5 * np.cos(np.pi * nearest_end)


def _slow_noise(rng: np.random.Generator, num_rows: int, num_samples: int) -> np.ndarray:
    """Generates independent noises of unit variance up to about 1 Hz: (num_rows, T)."""
    kernel = np.hanning(SAMPLE_RATE_HZ)
    kernel /= np.linalg.norm(kernel)
    white = rng.standard_normal((num_rows, num_samples + len(kernel) - 1))
    return np.stack([np.convolve(row, kernel, mode="valid") for row in white])


def _random_rotation(rng: np.random.Generator, spread_deg: float) -> np.ndarray:
    """Returns a rotation about a random axis by an angle from N(0, spread): (3, 3)."""
    angle = np.deg2rad(rng.normal(0.0, spread_deg, 1))
    return rotation_matrices(rng.standard_normal((1, 3)), angle)[0]


def _windows(recording: np.ndarray) -> np.ndarray:
    """Cuts (9, T) into windows that overlap by half: (n, 9, 128)."""
    starts = np.arange(_WINDOWS_PER_BOUT) * (WINDOW_LENGTH // 2)
    windows = np.lib.stride_tricks.sliding_window_view(recording, WINDOW_LENGTH, axis=1)
    return windows[:, starts].swapaxes(0, 1)
