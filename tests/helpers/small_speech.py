"""Small data for speech recognition: a tone for each digit, in files named as in the Free Spoken Digit Dataset."""

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
    """Returns 0.15 to 0.3 s of audio, (length,) int16: the digit's tone and its octave, between faint noise.

    The noise is needed because normalisation over the utterance removes a constant sound.
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
    """Writes recordings of digits; recordings with an index below 5 belong to the test set."""
    folder.mkdir(parents=True, exist_ok=True)
    for digit in range(DIGITS):
        for speaker in speakers:
            for index in indices:
                write_wav(folder / f"{digit}_{speaker}_{index}.wav", tone(digit, speaker, index))
    return folder


def write_sentences(folder: Path) -> Path:
    """Writes 24 utterances of two digits with their transcripts, without a split or speakers."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("one", "two", "too", "no")
    for i in range(24):
        first, second = i % 4, i // 4 % 4
        write_wav(folder / f"{i:02d}.wav", np.concatenate([tone(first, index=i), tone(second, index=i)]))
        (folder / f"{i:02d}.txt").write_text(f"{words[first]} {words[second]}")
    return folder


def names_of(dataset: Any, index: np.ndarray, epoch: int = 0) -> list[str]:
    """Returns the names of the recordings that samples consist of."""
    samples = dataset.__getitems__(SampleKeys(index, epoch))
    return ["+".join(dataset.corpus.names[i] for i in row if i >= 0) for row in samples["recordings"]]
