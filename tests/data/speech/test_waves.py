"""Tests batches of audio made on a device against recordings made one by one on the host."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.speech import waves
from data.speech.augmentation import Augmentation, Augmenter, at_duration, length_at
from data.speech.corpus import Corpus
from data.speech.text import Alphabet
from data.speech.utterances import Strings, Utterances
from tests.helpers.on_device import HERE, some_keys
from trainer.loading.on_device import moved

WORDS = ("ab", "c", "de f")
AUGMENTERS = {
    "none": None,
    "usual": Augmenter(Augmentation(), 40, seed=3),
    "strong": Augmenter(Augmentation().times(2.0), 40, seed=3, num_views=2),
    "noiseless": Augmenter(replace(Augmentation(), noise_snr_db=None, room_share=0.0), 40, seed=3),
    "nothing": Augmenter(Augmentation().times(0.0), 40, seed=3),
}


def sounds(lengths) -> list[np.ndarray]:
    """Returns int16 noise, which contains all frequencies."""
    rng = np.random.default_rng(0)
    return [rng.normal(0, 3000, length).astype(np.int16) for length in lengths]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    lengths = [1, 2, 99, 100, 101, 1700, *np.random.default_rng(1).integers(300, 900, 14)]
    audio = sounds(lengths)
    audio[9][:] = 0  # silence
    return Corpus(
        audio=np.concatenate(audio),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        sample_rate=1000,
        transcripts=tuple(WORDS[i % 3] for i in range(20)),
        names=tuple(map(str, range(20))),
        speakers=tuple("xy"[i % 2] for i in range(20)),
        splits=("",) * 20,
        skipped={},
    )


@pytest.mark.parametrize("growing_epochs", [None, 0, 5], ids=["utterances", "strings", "growing strings"])
@pytest.mark.parametrize("name", AUGMENTERS)
def test_batches_on_a_device_equal_batches_on_the_host(corpus, name, growing_epochs) -> None:
    alphabet = Alphabet.from_transcripts([" ".join(WORDS)], "characters")
    own = Utterances(corpus, np.arange(1, 20), alphabet, AUGMENTERS[name])
    if growing_epochs is not None:
        strings = {"num_words": (1, 4), "num_strings": 20, "seed": 5, "growing_epochs": growing_epochs}
        own = Strings(corpus, np.arange(1, 20), alphabet, AUGMENTERS[name], **strings)
    (there,) = moved([own], HERE)
    for keys in some_keys(len(own)):
        expected, found = own.__getitems__(keys), there.__getitems__(keys)
        assert found.keys() == expected.keys()
        for part, values in expected.items():
            assert found[part].numpy().dtype == values.dtype and found[part].shape == values.shape
            if part != "audio":
                np.testing.assert_array_equal(found[part].numpy(), values, err_msg=part)
        apart = found["audio"].numpy().astype(np.float64) - expected["audio"]
        powers = (expected["audio"].astype(np.float64) ** 2).sum(axis=1)
        assert ((apart**2).sum(axis=1) <= 1e-10 * powers).all()
        behind = np.arange(apart.shape[1]) >= expected["num_samples"][:, None]
        assert (found["audio"].numpy()[behind] == 0).all()


def test_recordings_of_any_length_are_resampled_by_any_ratio() -> None:
    lengths, percent = (
        part.ravel() for part in np.meshgrid([1, 7, 99, 100, 150, 1999], [10, 85, 99, 100, 101, 115, 190])
    )
    audio = [sound / np.float32(2**15) for sound in sounds(lengths)]
    padded = np.zeros((len(audio), lengths.max()), np.float32)
    for row, sound in zip(padded, audio, strict=True):
        row[: len(sound)] = sound
    width = int(length_at(lengths, percent).max())
    found = waves.at_durations(torch.from_numpy(padded), lengths, percent, width, torch.from_numpy).numpy()
    for row, sound, share in zip(found, audio, percent, strict=True):
        expected = at_duration(sound, share)
        assert np.square(row[: len(expected)] - expected).sum() <= 1e-10 * np.square(sound).sum()
        assert not row[len(expected) :].any()
