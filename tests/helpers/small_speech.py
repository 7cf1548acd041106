"""Spoken digits in small: a tone for each digit, named as the Free Spoken Digit Dataset is."""

import wave
from pathlib import Path
from typing import Any

import numpy as np

from trainer.loading.order import SampleKeys

RATE = 8000
SPEAKERS = ("anna", "ben", "cleo")
DIGITS = 4
_MEMORY = ["--num-mels", 12, "--memory-size", 4, "--theta", 4]
SMALL = [*_MEMORY, "--width", 8, "--num-blocks", 1, "--channels", 2]
SMALL_LMU = [*_MEMORY, "--model", "lmu", "--hidden-size", 8, "--num-layers", 1, "--num-heads", 2]


def tone(digit: int, speaker: str = "anna", index: int = 0) -> np.ndarray:
    """0.15 to 0.3 s: the digit's tone with its octave, at a voice's pitch, between faint noise: (length,) int16.

    What sounds alike all the time is nothing after normalisation over the utterance.
    """
    rng = np.random.default_rng([digit, SPEAKERS.index(speaker), index])
    pitch = (1 + 0.05 * SPEAKERS.index(speaker)) * (300 + 350 * digit)
    length = rng.integers(1200, 2400)
    phase = 2 * np.pi * pitch / RATE * np.arange(length)
    sound = np.sin(phase) + 0.5 * np.sin(2 * phase)
    sound[:400] = sound[-400:] = 0
    return (8000 * (sound + 0.02 * rng.normal(size=length))).astype(np.int16)


def write_wav(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return path


def write_digits(folder: Path, indices: range = range(3, 9), speakers: tuple[str, ...] = SPEAKERS) -> Path:
    """Those of an index below 5 are the test."""
    folder.mkdir(parents=True, exist_ok=True)
    for digit in range(DIGITS):
        for speaker in speakers:
            for index in indices:
                write_wav(folder / f"{digit}_{speaker}_{index}.wav", tone(digit, speaker, index))
    return folder


def write_sentences(folder: Path) -> Path:
    """Two digits in words each, beside a text: 24 utterances; no split, and no speaker."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("one", "two", "too", "no")
    for i in range(24):
        first, second = i % 4, i // 4 % 4
        write_wav(folder / f"{i:02d}.wav", np.concatenate([tone(first, index=i), tone(second, index=i)]))
        (folder / f"{i:02d}.txt").write_text(f"{words[first]} {words[second]}")
    return folder


def names_of(dataset: Any, index: np.ndarray, epoch: int = 0) -> list[str]:
    """The recordings that samples consist of."""
    samples = dataset.__getitems__(SampleKeys(index, epoch))
    return ["+".join(dataset.corpus.names[i] for i in row if i >= 0) for row in samples["recordings"]]
