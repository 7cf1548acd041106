"""Random augmentation of training utterances, which imitates other voices, rooms and microphones."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from trainer.loading.cache import Arrays
from trainer.loading.counter_random import normal, uniform

Length = TypeVar("Length", int, np.ndarray)

_AUDIO_STREAM, _WARP_STREAM, _FREQ_STREAM, _TIME_STREAM, _MASKING_STREAM, _WORD_STREAM, _ROOM_STREAM = range(7)
NOISE_LENGTH = 2**16
COLOURS = (0.0, 0.7, 0.97)
"""Coefficients c of noise n_t = c n_(t-1) + white noise."""


@dataclass(frozen=True)
class Augmentation:
    """Strengths of random changes to training utterances; strength 0, or None, disables a change.

    speed_percent: change of playing speed, which also shifts pitch and formants. The new duration is an integer
        percentage of the old one, uniform in [100 - speed_percent, 100 + speed_percent]. Ko et al., "Audio augmentation
        for speech recognition", Interspeech 2015.
    word_speed_percent: additional change of playing speed of each recording in a string (concatenated recordings).
    gain_db: change of loudness in dB, uniform in [-gain_db, gain_db].
    tilt: change of high frequencies, as by another microphone: x_t - k x_(t-1) with k uniform in [-tilt, tilt].
    noise_snr_db: limits of the signal-to-noise ratio, in dB, of white or low-frequency noise.
    room_share: share of strings with room noise, which fills recordings but not the gaps between them.
    room_snr_db: limits of the signal-to-noise ratio, in dB, of room noise; the ratio is constant within a string.
    warp: change of the features' frequencies by a factor uniform in [1 - warp, 1 + warp]. Jaitly and Hinton, "Vocal
        tract length perturbation improves speech recognition", 2013.
    masking_db: limits of the reduction, in dB, of the white noise with which the front end masks weak sounds.
    num_freq_masks: number of masked bands of mel bins. freq_mask: largest share of bins per band.
    num_time_masks: number of masked intervals of time. time_mask: largest share of the utterance per interval. Park et
        al., "SpecAugment", Interspeech 2019.
    """

    speed_percent: int = 15
    word_speed_percent: int = 10
    gain_db: float = 6.0
    tilt: float = 0.2
    noise_snr_db: tuple[float, float] | None = (5.0, 35.0)
    room_share: float = 0.4
    room_snr_db: tuple[float, float] = (10.0, 40.0)
    warp: float = 0.16
    masking_db: tuple[float, float] = (-8.0, 20.0)
    num_freq_masks: int = 2
    freq_mask: float = 0.2
    num_time_masks: int = 2
    time_mask: float = 0.06

    def times(self, factor: float) -> "Augmentation":
        """Returns a copy with strengths, such as the amplitude of noise, multiplied by a factor of at least 0."""
        return replace(
            self,
            speed_percent=min(round(factor * self.speed_percent), 90),
            word_speed_percent=min(round(factor * self.word_speed_percent), 90),
            gain_db=factor * self.gain_db,
            tilt=min(factor * self.tilt, 0.9),
            noise_snr_db=self._quieter_noise(factor),
            room_share=min(factor * self.room_share, 1.0),
            warp=min(factor * self.warp, 0.5),
            masking_db=(factor * self.masking_db[0], factor * self.masking_db[1]),
            freq_mask=min(factor * self.freq_mask, 1.0),
            time_mask=min(factor * self.time_mask, 1.0),
        )

    def _quieter_noise(self, factor: float) -> tuple[float, float] | None:
        if self.noise_snr_db is None or factor == 0:
            return None
        lowest, highest = self.noise_snr_db
        return lowest - 20 * math.log10(factor), highest - 20 * math.log10(factor)


class Noise(NamedTuple):
    """Parameters of the noise in several recordings.

    snr_db: signal-to-noise ratio in dB; infinite for no noise. start: int64, first sample in the noise table. colour:
    int64, index of the table in COLOURS.
    """

    snr_db: np.ndarray
    start: np.ndarray
    colour: np.ndarray

    @classmethod
    def drawn(cls, snr_db: tuple[float, float], ratio: np.ndarray, part: np.ndarray, colour: np.ndarray) -> "Noise":
        """Computes parameters of noise from draws in [0, 1). snr_db: limits of the signal-to-noise ratio."""
        lowest, highest = snr_db
        start = (part * (NOISE_LENGTH / 2)).astype(np.int64)
        return cls(lowest + (highest - lowest) * ratio, start, (colour * len(COLOURS)).astype(np.int64))


Changes = tuple[np.ndarray, np.ndarray, np.ndarray, Noise | None]
"""Changes of n utterances: new duration in percent (n,) int64, gain and tilt (n,) float32, and noise or None."""


class Augmenter:
    """Draws the changes of an `Augmentation`; applies them to audio, or returns them for the model's front end."""

    def __init__(self, strength: Augmentation, num_mels: int, seed: int, num_views: int = 1) -> None:
        """Creates the augmenter. num_views: number of differently masked views per utterance."""
        self._strength = strength
        self._num_mels = num_mels
        self._seed = seed
        self._num_views = num_views

    def lengths(self, lengths: np.ndarray, epoch: int, index: np.ndarray) -> np.ndarray:
        """Returns augmented lengths, (n,) int64. lengths: (n,), before augmentation. index: (n,), sample indices."""
        return length_at(lengths, self.changes(epoch, index)[0])

    def word_percent(self, epoch: int, index: np.ndarray, num_words: int) -> np.ndarray:
        """Returns durations in percent of the original, (n, num_words) int64, for each recording in n strings."""
        draws = uniform(self._seed, epoch, index, (num_words,), _WORD_STREAM)
        return _percent(self._strength.word_speed_percent, draws)

    def rooms(self, epoch: int, index: np.ndarray, num_words: int) -> Noise:
        """Returns room-noise parameters of shape (n, num_words), one for each recording in each of n strings."""
        draws = uniform(self._seed, epoch, index, (3 + num_words,), _ROOM_STREAM)
        has_room, ratio, colour = (draws[:, i : i + 1].repeat(num_words, axis=1) for i in range(3))
        noise = Noise.drawn(self._strength.room_snr_db, ratio, draws[:, 3:], colour)
        return noise._replace(snr_db=np.where(has_room < self._strength.room_share, noise.snr_db, np.inf))

    def changes(self, epoch: int, index: np.ndarray) -> Changes:
        """Draws the changes that the method `audio` applies."""
        strength, draws = self._strength, uniform(self._seed, epoch, index, (6,), _AUDIO_STREAM)
        gain, tilt = from_db(strength.gain_db * (2 * draws[:, 1] - 1)), strength.tilt * (2 * draws[:, 4] - 1)
        snr_db = strength.noise_snr_db
        noise = None if snr_db is None else Noise.drawn(snr_db, draws[:, 2], draws[:, 3], draws[:, 5])
        return _percent(strength.speed_percent, draws[:, 0]), gain, tilt, noise

    def audio(self, utterances: list[np.ndarray], epoch: int, index: np.ndarray) -> list[np.ndarray]:
        """Applies changes to n utterances, (length,) float32 each, possibly in place."""
        percents, gain, tilt, noise = self.changes(epoch, index)
        changed = []
        for i, audio in enumerate(utterances):
            audio = at_duration(audio, int(percents[i]))
            audio *= gain[i]
            audio[1:] -= tilt[i] * audio[:-1]
            if noise is not None:
                add_noise(audio, noise.snr_db[i], noise.start[i], noise.colour[i])
            changed.append(audio)
        return changed

    def for_front_end(self, epoch: int, index: np.ndarray) -> Arrays:
        """Returns the changes that the model's front end applies.

        {"warp", "masking_db": (n,) float32; "freq_masks": (n, num_freq_masks, 2) int64, start and width in mel bins;
        "time_masks": (n, num_time_masks, 2) float32, start and width as shares of the utterance}. With several views,
        the masks of each view follow the masks of the previous view.
        """
        strength = self._strength
        draws = {
            stream: uniform(self._seed, epoch, index, (self._num_views * num, 2), stream)
            for stream, num in ((_FREQ_STREAM, strength.num_freq_masks), (_TIME_STREAM, strength.num_time_masks))
        }
        most_bins = int(strength.freq_mask * self._num_mels)
        num_bins = np.floor((most_bins + 1) * draws[_FREQ_STREAM][:, :, 1])
        first_bin = np.floor((self._num_mels - num_bins + 1) * draws[_FREQ_STREAM][:, :, 0])
        share = np.float32(strength.time_mask) * draws[_TIME_STREAM][:, :, 1]
        start = (1 - share) * draws[_TIME_STREAM][:, :, 0]
        least, most = strength.masking_db
        masking_db = least + (most - least) * uniform(self._seed, epoch, index, (), _MASKING_STREAM)
        return {
            "warp": 1 + np.float32(strength.warp) * (2 * uniform(self._seed, epoch, index, (), _WARP_STREAM) - 1),
            "masking_db": masking_db.astype(np.float32),
            "freq_masks": np.stack([first_bin, num_bins], axis=2).astype(np.int64),
            "time_masks": np.stack([start, share], axis=2),
        }


def length_at(length: Length, percent: Length) -> Length:
    """Returns the length, in samples, of audio that is changed to a percentage of its duration."""
    return -(-length * percent // 100)


def at_duration(audio: np.ndarray, percent: int) -> np.ndarray:
    """Resamples audio (length,) float32 to a percentage of its duration: (length_at(...),) float32.

    Interpolates with an ideal low-pass filter, using Fourier transforms. The audio is padded with zeros to a multiple
    of 100 samples, so that any whole percentage is a whole number of samples.
    """
    if percent == 100:
        return audio
    num = hundreds(len(audio))
    spectrum = np.fft.rfft(audio, 100 * num)
    resampled = np.fft.irfft(spectrum, percent * num)[: length_at(len(audio), percent)]
    return (resampled * np.float32(percent / 100)).astype(np.float32, copy=False)


def add_noise(audio: np.ndarray, snr_db: float, start: int, colour: int = 0) -> None:
    """Adds noise to audio (length,) float32 in place. start: first sample in the noise table `colour`."""
    power = np.dot(audio, audio) / len(audio)
    table = noise_tables()[colour * NOISE_LENGTH : (colour + 1) * NOISE_LENGTH]
    noise = np.resize(table[start:], len(audio))
    noise *= np.sqrt(power) * from_db(-snr_db)
    audio += noise


def from_db(decibels: float | np.ndarray) -> np.ndarray:
    """Converts dB to float32 factors on the amplitude."""
    return np.float32(10) ** (np.asarray(decibels, np.float32) / np.float32(20))


def _percent(spread: int, draws: np.ndarray) -> np.ndarray:
    """Maps draws in [0, 1) to integers in [100 - spread, 100 + spread], int64."""
    return 100 - spread + np.floor((2 * spread + 1) * draws).astype(np.int64)


@cache
def noise_tables() -> np.ndarray:
    """Returns a table of noise with unit variance for each of COLOURS: (len(COLOURS) * NOISE_LENGTH,) float32.

    Reading noise from a table is much faster than drawing it.
    """
    white = np.fft.rfft(normal(0, 0, np.zeros(1, np.int64), (NOISE_LENGTH,))[0])
    turn = np.exp(-2j * np.pi * np.fft.rfftfreq(NOISE_LENGTH))
    tables = [np.fft.irfft(white * (1 / (1 - colour * turn)), NOISE_LENGTH) for colour in COLOURS]
    return np.concatenate([(noise / noise.std()).astype(np.float32) for noise in tables])


@cache
def hundreds(length: int) -> int:
    """Returns the length of a Fourier transform for audio, in hundreds of samples: a product of powers of 2, 3 and 5.

    The length leaves room for padding with zeros, so that the end of the audio does not affect its start.
    """
    num = length // 100 + 2
    while True:
        rest = num
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return num
        num += 1
