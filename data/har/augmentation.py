"""Random augmentation of training windows, which imitates other positions of the phone and other ways of moving."""

from dataclasses import dataclass

import numpy as np

from trainer.loading.arrays import Array, arange_like, cast, namespace, take_along
from trainer.loading.counter_random import normal, uniform
from trainer.loading.on_device import Movable

_TURN_STREAM, _MAP_STREAM, _JITTER_STREAM, _TEMPO_STREAM = range(4)


@dataclass(frozen=True)
class Augmentation:
    """Strengths of random changes to training windows; strength 0 disables a change.

    max_rotation_deg: largest rotation, in degrees: all triplets (x, y and z of a sensor) of a window rotate about one
        random axis, by one angle uniform in [-max, max].
    scale_std: standard deviation of each channel's random factor, which is normal with mean 1.
    tempo_spread: change of speed by a factor uniform in [1 - spread, 1 + spread]. The window is stretched about its
        middle, or compressed and padded with its first and last samples.
    jitter_std: standard deviation of white noise, relative to the channel's standard deviation.
    """

    max_rotation_deg: float
    scale_std: float
    tempo_spread: float
    jitter_std: float


class WindowAugmenter(Movable):
    """Applies an `Augmentation` to windows."""

    def __init__(self, strength: Augmentation, std: np.ndarray, seed: int, num_triplets: int = 3) -> None:
        """Creates the augmenter. std: (C,), standard deviation per channel.

        num_triplets: number of triplets, which come first among the channels.
        """
        self._strength = strength
        self._noise = np.float32(strength.jitter_std) * std.reshape(-1, 1).astype(np.float32)
        self._seed = seed
        self._num_channels, self._num_triplets = len(std), num_triplets

    def __call__(self, signals: Array, epoch: int, index: Array) -> Array:
        """Returns augmented windows. signals: windows (n, C, T) float32, not modified. index: (n,), sample indices."""
        num, _, length = signals.shape
        num_turned = 3 * self._num_triplets
        maps, factors = self.linear_maps(epoch, index)
        triplets = signals[:, :num_turned].reshape(num, self._num_triplets, 3, length)
        augmented = (maps @ triplets).reshape(num, num_turned, length)
        if num_turned < self._num_channels:
            others = factors[:, :, None] * signals[:, num_turned:]
            augmented = namespace(signals).concatenate([augmented, others], axis=1)
        if self._strength.tempo_spread > 0:
            draw = uniform(self._seed, epoch, index, (), _TEMPO_STREAM)
            augmented = at_tempo(augmented, 1 + np.float32(self._strength.tempo_spread) * (2 * draw - 1))
        if self._strength.jitter_std > 0:
            augmented += self._noise * normal(self._seed, epoch, index, signals.shape[1:], _JITTER_STREAM)
        return augmented

    def linear_maps(self, epoch: int, index: Array) -> tuple[Array, Array]:
        """Returns matrices that rotate and scale each window's triplets, and factors for its other channels.

        The shapes are (n, num_triplets, 3, 3) and (n, C - 3 * num_triplets), float32.
        """
        draws = normal(self._seed, epoch, index, (3 + self._num_channels,), _MAP_STREAM)
        axis, scale = draws[:, :3], 1 + np.float32(self._strength.scale_std) * draws[:, 3:]
        turn = uniform(self._seed, epoch, index, (), _TURN_STREAM)
        angle = np.float32(np.deg2rad(self._strength.max_rotation_deg)) * (2 * turn - 1)
        num_turned = 3 * self._num_triplets
        rotations = rotation_matrices(axis, angle)[:, None]
        factors = scale[:, :num_turned].reshape(len(index), self._num_triplets, 3, 1)
        return factors * rotations, scale[:, num_turned:]


def rotation_matrices(axis: Array, angle: Array) -> Array:
    """Returns rotation matrices (n, 3, 3) by angles (n,), in radians, about axes (n, 3) of any length."""
    xp = namespace(axis)
    x, y, z = (axis / xp.linalg.norm(axis, axis=1, keepdims=True)).T
    zero = xp.zeros_like(x)
    cross = xp.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=1).reshape(-1, 3, 3)
    sin, cos = xp.sin(angle)[:, None, None], xp.cos(angle)[:, None, None]
    ones = cast(arange_like(3, axis)[:, None] == arange_like(3, axis), "float32")
    return ones + sin * cross + (1 - cos) * (cross @ cross)


def at_tempo(signals: Array, factor: Array) -> Array:
    """Speeds up windows (n, C, T) by factors (n,), with linear interpolation; the middle of a window stays in place."""
    xp = namespace(signals)
    last = signals.shape[-1] - 1
    middle = np.float32(last / 2)
    offsets = cast(arange_like(last + 1, signals), "float32") - middle
    time = xp.clip(offsets * factor[:, None] + middle, 0, last)
    before = xp.clip(cast(time, "int64"), None, last - 1)
    share = (time - before)[:, None]
    before = before[:, None]
    left, right = (take_along(signals, position, 2) for position in (before, before + 1))
    left += share * (right - left)
    return left
