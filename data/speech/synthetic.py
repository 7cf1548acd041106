"""Synthetic speech: people who say short sentences.

A sentence has up to five words in order: a size, a colour, an animal, an action, and a place or time; animal and action
are always present. A word is a sequence of phones, and a phone is one or two sounds, each with target frequencies of
three formants and amplitudes of voice and noise. Formants glide between targets, so a sound depends on its neighbours.
A sawtooth (at the voice's pitch) and white noise pass through four resonances (source-filter model: Fant, "Acoustic
theory of speech production", 1960). Formants of vowels are the means of male speakers in Peterson and Barney, "Control
methods used in a study of the vowels", JASA 1952.

Speakers differ in pitch, vocal tract length, pace and each formant of each sound. Training, validation and test sets
have different speakers.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.speech.corpus import Corpus, cached_corpus

SAMPLE_RATE = 8000
NUM_UTTERANCES = {"train": 1000, "val": 100, "test": 100}
NUM_SPEAKERS = {"train": 18, "val": 3, "test": 3}
SNR_DB = (25.0, 40.0)
"""Range of the signal-to-noise ratio, in dB, of white background noise in an utterance."""

_FRAME = 128
"""Samples per frame, in which resonances are constant; frames overlap by half."""
_FORMAT_VERSION = 1


class _Sound(NamedTuple):
    """Targets of a sound: formants in Hz, amplitudes of voice and noise, duration in ms."""

    f1: float
    f2: float
    f3: float
    voice: float
    noise: float
    ms: float


def _vowel(f1: float, f2: float, f3: float) -> tuple[_Sound, ...]:
    return (_Sound(f1, f2, f3, 1.0, 0.02, 130),)


def _sonorant(f1: float, f2: float, f3: float, voice: float = 0.6) -> tuple[_Sound, ...]:
    return (_Sound(f1, f2, f3, voice, 0.01, 85),)


def _fricative(f1: float, f2: float, f3: float, noise: float, voice: float = 0.0) -> tuple[_Sound, ...]:
    return (_Sound(f1, f2, f3, voice, noise, 110),)


def _stop(f1: float, f2: float, f3: float, is_voiced: bool) -> tuple[_Sound, ...]:
    """Returns the sounds of a stop consonant: a closure (voiced or silent) and a burst (stronger if unvoiced)."""
    if is_voiced:
        return _Sound(f1, f2, f3, 0.15, 0.0, 60), _Sound(f1, f2, f3, 0.3, 0.4, 20)
    return _Sound(f1, f2, f3, 0.0, 0.0, 60), _Sound(f1, f2, f3, 0.0, 0.8, 40)


_PHONES = {
    "iy": _vowel(270, 2290, 3010),
    "ih": _vowel(390, 1990, 2550),
    "eh": _vowel(530, 1840, 2480),
    "ae": _vowel(660, 1720, 2410),
    "ah": _vowel(640, 1190, 2390),
    "aa": _vowel(730, 1090, 2440),
    "ao": _vowel(570, 840, 2410),
    "uh": _vowel(440, 1020, 2240),
    "uw": _vowel(300, 870, 2240),
    "er": _vowel(490, 1350, 1690),
    "w": _sonorant(290, 610, 2150),
    "r": _sonorant(310, 1060, 1380),
    "l": _sonorant(310, 1050, 2880),
    "m": _sonorant(250, 1100, 2130, voice=0.3),
    "n": _sonorant(250, 1450, 2470, voice=0.3),
    "ng": _sonorant(250, 2100, 2700, voice=0.3),
    "s": _fricative(2900, 3500, 3800, noise=0.15),
    "z": _fricative(2900, 3500, 3800, noise=0.10, voice=0.15),
    "sh": _fricative(1900, 2400, 3000, noise=0.15),
    "f": _fricative(1100, 2300, 3400, noise=0.2),
    "hh": _fricative(500, 1500, 2500, noise=0.15),
    "p": _stop(600, 900, 2000, is_voiced=False),
    "b": _stop(600, 900, 2000, is_voiced=True),
    "t": _stop(2500, 3200, 3700, is_voiced=False),
    "d": _stop(2500, 3200, 3700, is_voiced=True),
    "k": _stop(1400, 1900, 2700, is_voiced=False),
    "g": _stop(1400, 1900, 2700, is_voiced=True),
}
_LEXICON = (
    {"big": "b ih g", "fat": "f ae t", "small": "s m ao l", "tiny": "t aa iy n iy"},
    {"red": "r eh d", "black": "b l ae k", "green": "g r iy n", "pink": "p ih ng k"},
    {"dog": "d ao g", "cat": "k ae t", "fish": "f ih sh", "bird": "b er d", "fox": "f aa k s", "hen": "hh eh n"},
    {"runs": "r ah n z", "sings": "s ih ng z", "sleeps": "s l iy p s", "looks": "l uh k s", "digs": "d ih g z"},
    {"here": "hh iy r", "away": "ah w eh iy", "now": "n aa uw", "soon": "s uw n"},
)
"""Words and their phones, by position in the sentence."""
_ALWAYS_THERE = (2, 3)
_PAUSE = _Sound(500, 1500, 2500, 0.0, 0.0, 60)
_SOUNDS = np.array([_PAUSE, *(sound for sounds in _PHONES.values() for sound in sounds)], np.float32)
_FOURTH_FORMANT = 3500.0
_BANDWIDTHS = np.array([60.0, 90.0, 130.0, 200.0], np.float32)


@dataclass(frozen=True)
class _Speaker:
    """Voice of a person.

    pitch: in Hz. pace: factor on durations. accent: (sounds, 3), factors on the first three formants of each sound.
    fourth: fourth formant, in Hz.
    """

    pitch: float
    pace: float
    accent: np.ndarray
    fourth: float


def load_synthetic_corpus(cache_dir: Path) -> Corpus:
    """Generates 1,200 utterances of 24 speakers, 29 minutes in total; the result is fixed, and cached."""
    return cached_corpus(cache_dir, f"speech_synthetic-{_FORMAT_VERSION}", generate)


def generate() -> Corpus:
    """Generates the corpus."""
    audio: list[np.ndarray] = []
    transcripts, speakers, splits = [], [], []
    for split, num_utterances in NUM_UTTERANCES.items():
        people = [f"{split}{k}" for k in range(NUM_SPEAKERS[split])]
        voices = [_speaker(np.random.default_rng([len(audio), k])) for k in range(len(people))]
        for i in range(num_utterances):
            rng = np.random.default_rng(len(audio))
            words = _sentence(rng)
            audio.append(_speak(words, voices[i % len(people)], rng))
            transcripts.append(" ".join(words))
            speakers.append(people[i % len(people)])
            splits.append(split)
    return Corpus(
        audio=np.concatenate(audio),
        offsets=np.cumsum([0, *map(len, audio)]),
        sample_rate=SAMPLE_RATE,
        transcripts=tuple(transcripts),
        names=tuple(f"{number:04d}" for number in range(len(audio))),
        speakers=tuple(speakers),
        splits=tuple(splits),
        skipped={},
    )


def _speaker(rng: np.random.Generator) -> _Speaker:
    # short vocal tracts raise formants, and mostly go with high voices
    size = rng.uniform(-1, 1)
    tract = np.exp(0.10 * size)
    return _Speaker(
        pitch=130 * np.exp(0.3 * size + 0.1 * rng.standard_normal()),
        pace=np.exp(0.1 * rng.standard_normal()),
        accent=tract * np.exp(0.02 * rng.standard_normal((len(_SOUNDS), 3))),
        fourth=tract * _FOURTH_FORMANT,
    )


def _sentence(rng: np.random.Generator) -> list[str]:
    is_there = rng.random(len(_LEXICON)) < 0.4
    is_there[list(_ALWAYS_THERE)] = True
    return [list(words)[rng.integers(len(words))] for words, there in zip(_LEXICON, is_there, strict=True) if there]


@cache
def _pronunciation(word: str) -> list[int]:
    """Returns the sounds of a word as indices into _SOUNDS."""
    first = dict(zip(_PHONES, np.cumsum([1, *map(len, _PHONES.values())]).tolist(), strict=False))
    (phones,) = (words[word] for words in _LEXICON if word in words)
    return [first[phone] + k for phone in phones.split() for k in range(len(_PHONES[phone]))]


def _speak(words: list[str], speaker: _Speaker, rng: np.random.Generator) -> np.ndarray:
    """Synthesises a sentence: (length,) int16."""
    chosen = [0]
    for word in words:
        chosen += _pronunciation(word)
        if word == words[-1] or rng.random() < 0.3:
            chosen.append(0)
    sounds = _SOUNDS[chosen]
    duration = sounds[:, 5] * speaker.pace * np.exp(0.15 * rng.standard_normal(len(chosen))) * (SAMPLE_RATE / 1000)
    end = np.cumsum(duration)
    start, num_samples = end - duration, int(end[-1])
    formants = sounds[:, :3] * speaker.accent[chosen] * np.exp(0.015 * rng.standard_normal((len(chosen), 3)))
    frames = np.arange(0, num_samples + _FRAME // 2, _FRAME // 2)
    glide = 0.3 * duration
    tracks = [_between(frames, start + glide, end - glide, formant) for formant in formants.T]
    # voice and noise change within 5 ms
    edge = np.minimum(glide, 0.0025 * SAMPLE_RATE)
    time = np.arange(num_samples)
    voice, noise = (_between(time, start + edge, end - edge, strength) for strength in sounds[:, 3:5].T)
    source = voice * _sawtooth(speaker.pitch, num_samples, rng) + noise * rng.standard_normal(num_samples, np.float32)
    return _recorded(_resonate(source, np.stack([*tracks, np.full_like(tracks[0], speaker.fourth)], axis=1)), rng)


def _between(time: np.ndarray, start: np.ndarray, end: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Interpolates linearly between values; values[k] holds from start[k] to end[k]. Returns (len(time),) float32."""
    return np.interp(time, np.stack([start, end], axis=1).ravel(), np.repeat(values, 2)).astype(np.float32)


def _sawtooth(pitch: float, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """Generates the glottal source, (num_samples,), with a pitch that falls by 18 % and varies at random."""
    knots = np.linspace(1.1, 0.9, 8) + 0.04 * rng.standard_normal(8)
    relative = np.interp(np.arange(num_samples), np.linspace(0, num_samples, len(knots)), knots)
    cycles = np.cumsum(relative) * (pitch / SAMPLE_RATE)
    return (cycles - np.floor(cycles) - 0.5).astype(np.float32)


def _resonate(source: np.ndarray, formants: np.ndarray) -> np.ndarray:
    """Filters a source (n,) with resonances at formants (T, 4), in Hz, one row per half frame: (n,) float32.

    Multiplies the spectra of overlapping frames by the magnitudes of the resonances.
    """
    hop = _FRAME // 2
    padded = np.pad(source, (hop, len(formants) * hop - len(source)))
    window = np.sin(np.pi * (np.arange(_FRAME, dtype=np.float32) + 0.5) / _FRAME)  # overlapping squares add up to 1
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::hop] * window
    hz2 = np.fft.rfftfreq(_FRAME, 1 / SAMPLE_RATE).astype(np.float32) ** 2
    power = np.ones((len(formants), len(hz2)), np.float32)
    for formant, bandwidth in zip(formants.T, _BANDWIDTHS, strict=True):
        centre = formant[:, None] ** 2
        power *= centre**2 / ((hz2 - centre) ** 2 + hz2 * bandwidth**2)
    frames = np.fft.irfft(np.fft.rfft(frames) * np.sqrt(power), _FRAME) * window
    return (frames[:-1, hop:] + frames[1:, :hop]).ravel()[: len(source)]


def _recorded(speech: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Adds background noise to speech (n,), and sets a random level: (n,) int16."""
    snr_db, level_db = rng.uniform(*SNR_DB), rng.uniform(-32, -20)
    speech /= np.sqrt(np.mean(speech**2))
    speech += 10 ** (-snr_db / 20) * rng.standard_normal(len(speech), np.float32)
    return np.clip(speech * (32768 * 10 ** (level_db / 20)), -32768, 32767).astype(np.int16)
