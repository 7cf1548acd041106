"""Random changes of training windows: the phone sits, and the person moves, a little differently."""

from dataclasses import dataclass

import numpy as np

from trainer.loading.counter_random import normal, uniform

_TURN_STREAM, _MAP_STREAM, _JITTER_STREAM, _TEMPO_STREAM = range(4)


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training windows; a strength of 0 turns a change off.

    max_rotation_deg: the phone sits differently: one rotation of all triplets of a window (x, y and z of a sensor)
        together, about a random axis, by an angle uniform in [-max, max] degrees.
    scale_std: each channel is multiplied by a factor from N(1, scale_std), in physical units.
    tempo_spread: the person moves faster or slower, by a factor uniform in [1 - spread, 1 + spread]: the window is
        stretched or squeezed about its middle, and where it then falls short, its first or last sample is held.
    jitter_std: white noise, in standard deviations of the channel.
    """

    max_rotation_deg: float
    scale_std: float
    tempo_spread: float
    jitter_std: float


class WindowAugmenter:
    """Applies an Augmentation."""

    def __init__(self, strength: Augmentation, std: np.ndarray, seed: int, num_triplets: int = 3) -> None:
        """std: (C,), the deviation of each channel, in which jitter is measured. num_triplets: come first in C."""
        self._strength = strength
        self._noise = np.float32(strength.jitter_std) * std.reshape(-1, 1).astype(np.float32)
        self._seed = seed
        self._num_channels, self._num_triplets = len(std), num_triplets

    def __call__(self, signals: np.ndarray, epoch: int, index: np.ndarray) -> np.ndarray:
        """signals: (n, C, T) float32, left as they are. index: (n,) their sample ids."""
        num, _, length = signals.shape
        num_turned = 3 * self._num_triplets
        maps, factors = self.linear_maps(epoch, index)
        triplets = signals[:, :num_turned].reshape(num, self._num_triplets, 3, length)
        augmented = (maps @ triplets).reshape(num, num_turned, length)
        if num_turned < self._num_channels:
            augmented = np.concatenate([augmented, factors[:, :, None] * signals[:, num_turned:]], axis=1)
        if self._strength.tempo_spread > 0:
            draw = uniform(self._seed, epoch, index, (), _TEMPO_STREAM)
            augmented = at_tempo(augmented, 1 + np.float32(self._strength.tempo_spread) * (2 * draw - 1))
        if self._strength.jitter_std > 0:
            augmented += self._noise * normal(self._seed, epoch, index, signals.shape[1:], _JITTER_STREAM)
        return augmented

    def linear_maps(self, epoch: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each window the random rotation, then scale, of its triplets, and the factors of its other channels.

        (n, num_triplets, 3, 3) and (n, C - 3 * num_triplets) float32.
        """
        draws = normal(self._seed, epoch, index, (3 + self._num_channels,), _MAP_STREAM)
        axis, scale = draws[:, :3], 1 + np.float32(self._strength.scale_std) * draws[:, 3:]
        turn = uniform(self._seed, epoch, index, (), _TURN_STREAM)
        angle = np.float32(np.deg2rad(self._strength.max_rotation_deg)) * (2 * turn - 1)
        of_triplets, of_others = np.split(scale, [3 * self._num_triplets], axis=1)
        rotations = rotation_matrices(axis, angle)[:, None]
        return of_triplets.reshape(len(index), self._num_triplets, 3, 1) * rotations, of_others


def rotation_matrices(axis: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Rotations by the angles (n,), in radians, about the axes (n, 3), of any length: (n, 3, 3), by Rodrigues."""
    x, y, z = (axis / np.linalg.norm(axis, axis=1, keepdims=True)).T
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=1).reshape(-1, 3, 3)
    sin, cos = np.sin(angle)[:, None, None], np.cos(angle)[:, None, None]
    return np.eye(3, dtype=axis.dtype) + sin * cross + (1 - cos) * (cross @ cross)


def at_tempo(signals: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Windows (n, C, T) played `factor` (n,) times as fast about their middles, by linear interpolation."""
    last = signals.shape[-1] - 1
    middle = np.float32(last / 2)
    time = np.clip((np.arange(last + 1, dtype=np.float32) - middle) * factor[:, None] + middle, 0, last)
    before = np.minimum(time.astype(np.int64), last - 1)
    share = (time - before)[:, None]
    before = before[:, None]
    left, right = (np.take_along_axis(signals, position, axis=2) for position in (before, before + 1))
    left += share * (right - left)
    return left
