"""Tests batches of utterances and of digit strings: their content, their lengths, and what they depend on."""

from dataclasses import replace

import numpy as np
import pytest

from data.speech.augmentation import Augmentation, Augmenter
from data.speech.corpus import Corpus
from data.speech.text import Alphabet
from data.speech.utterances import LEVEL_DB, MOST_GAP_S, STRING_SNR_DB, Strings, Utterances
from tests.helpers.small_speech import names_of
from trainer.loading.batches import KeyedDataset
from trainer.loading.order import SampleKeys

RATE = 8000
WORDS = "ab cde f gh i".split()
NUM = 60
LOUD = 8000


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Corpus of words by three speakers; all samples of recording i are LOUD + i, and no two are equally long."""
    rng = np.random.default_rng(0)
    lengths = 300 + 30 * rng.permutation(NUM)
    speakers = rng.permutation(np.repeat(["x", "y", "z"], [10, 20, 30]))
    return Corpus(
        audio=np.repeat(LOUD + np.arange(NUM), lengths).astype(np.int16),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        sample_rate=RATE,
        transcripts=tuple(WORDS[i % 5] for i in range(NUM)),
        names=tuple(f"{i}.wav" for i in range(NUM)),
        speakers=tuple(speakers.tolist()),
        splits=("",) * NUM,
        skipped={},
    )


@pytest.fixture(scope="module")
def alphabet() -> Alphabet:
    return Alphabet.from_transcripts([" ".join(WORDS)], "characters")


def strings(corpus, alphabet, augmenter=None, seed=0, **settings) -> Strings:
    indices = np.arange(5, NUM)
    return Strings(corpus, indices, alphabet, augmenter, **{"num_strings": 500, "seed": seed, **settings})


def augmenter() -> Augmenter:
    return Augmenter(Augmentation(), num_mels=40, seed=7)


def keys(*index: int, epoch: int = 0) -> SampleKeys:
    return SampleKeys(np.array(index), epoch)


def test_validation_utterances_are_not_augmented(corpus, alphabet) -> None:
    indices = np.array([7, 3, 59])
    dataset: KeyedDataset = Utterances(corpus, indices, alphabet)
    batch = dataset.__getitems__(keys(2, 0))
    assert batch["audio"].dtype == np.float32 and batch["num_samples"].dtype == np.int64
    assert batch["audio"].shape[1] == batch["num_samples"].max()
    for row, i in enumerate((59, 7)):
        length, symbols = batch["num_samples"][row], batch["target_length"][row]
        np.testing.assert_array_equal(batch["audio"][row, :length], corpus.utterance(i) / np.float32(32768))
        assert (batch["audio"][row, length:] == 0).all() and (batch["targets"][row, symbols:] == 0).all()
        assert alphabet.decode(batch["targets"][row, :symbols]) == corpus.transcripts[i]
    assert dataset.lengths(0).tolist() == [len(corpus.utterance(i)) for i in indices]
    assert names_of(dataset, np.array([1])) == ["3.wav"] and dataset.transcripts(np.array([1])) == [WORDS[3]]
    assert set(Utterances(corpus, indices, None).__getitems__(keys(0))) == {"audio", "num_samples", "recordings"}


def test_a_digit_string_joins_recordings_of_one_speaker(corpus, alphabet) -> None:
    dataset = strings(corpus, alphabet, seed=1)
    index = np.arange(500)
    batch = dataset.__getitems__(SampleKeys(index, 0))
    names, transcripts = names_of(dataset, index), dataset.transcripts(index)
    speakers, counts, gaps = [], [], []
    for row in range(500):
        recordings = [int(name.removesuffix(".wav")) for name in names[row].split("+")]
        assert all(i >= 5 for i in recordings)  # the first five are held out
        assert transcripts[row] == " ".join(corpus.transcripts[i] for i in recordings)
        assert alphabet.decode(batch["targets"][row]) == transcripts[row]
        (speaker,) = {corpus.speakers[i] for i in recordings}
        speakers.append(speaker)
        counts.append(len(recordings))
        gaps.append(batch["num_samples"][row] - sum(len(corpus.utterance(i)) for i in recordings))
    assert set(counts) == {3, 4, 5, 6, 7}
    shares = [speakers.count(s) / 500 for s in "xyz"]
    np.testing.assert_allclose(shares, [corpus.speakers[5:].count(s) / 55 for s in "xyz"], atol=0.06)
    most = np.array([(count + 1) * MOST_GAP_S * RATE for count in counts])
    assert (np.array(gaps) >= 0).all() and (np.array(gaps) <= most).all()
    assert np.mean(gaps / most) == pytest.approx(0.5, abs=0.02)


def test_a_string_joins_recordings_at_their_levels_in_light_noise(corpus, alphabet) -> None:
    """Constant recordings rise above the noise, which shows where each begins and at which level."""
    dataset = strings(corpus, alphabet)
    index = np.arange(200)
    batch = dataset.__getitems__(SampleKeys(index, 0))
    levels, ratios = [], []
    for row, name in enumerate(names_of(dataset, index)):
        recordings = [int(part.removesuffix(".wav")) for part in name.split("+")]
        audio = batch["audio"][row, : batch["num_samples"][row]].astype(np.float64) / LOUD * 32768
        borders = np.flatnonzero(np.diff(np.concatenate([[False], audio > 0.35, [False]]).astype(int)))
        starts, ends = borders[::2], borders[1::2]
        assert (ends - starts).tolist() == [len(corpus.utterance(i)) for i in recordings]
        pauses = np.diff(np.stack([np.append(0, ends), np.append(starts, len(audio))]), axis=0)
        assert pauses.max() <= MOST_GAP_S * RATE
        clean = np.zeros_like(audio)
        for start, end in zip(starts, ends, strict=True):
            levels.append(20 * np.log10(audio[start:end].mean()))
            clean[start:end] = audio[start:end].mean()
        ratios.append(10 * np.log10(np.mean(clean**2) / np.mean((audio - clean) ** 2)))
    assert -LEVEL_DB - 0.1 < min(levels) < 0.9 * -LEVEL_DB and 0.9 * LEVEL_DB < max(levels) < LEVEL_DB + 0.1
    assert np.abs(np.array(ratios) - np.mean(STRING_SNR_DB)).max() < np.ptp(STRING_SNR_DB) / 2 + 0.5
    assert np.ptp(ratios) > 0.9 * np.ptp(STRING_SNR_DB)


def test_strings_grow_over_the_first_epochs(corpus, alphabet) -> None:
    dataset = strings(corpus, alphabet, growing_epochs=4)

    def counts(epoch: int) -> set[int]:
        return {len(text.split()) for text in dataset.transcripts(np.arange(500), epoch)}

    assert [counts(epoch) for epoch in range(6)] == [{1}, {1, 2, 3}, {2, 3, 4}, {3, 4, 5}, *[{3, 4, 5, 6, 7}] * 2]
    lengths, batch = dataset.lengths(1), dataset.__getitems__(keys(3, 5, epoch=1))
    assert lengths[[3, 5]].tolist() == batch["num_samples"].tolist()


def test_lengths_match_the_batches(corpus, alphabet) -> None:
    for augment in (None, augmenter()):
        for dataset in (Utterances(corpus, np.arange(10, 40), alphabet, augment), strings(corpus, alphabet, augment)):
            for epoch in (0, 3):
                lengths = dataset.lengths(epoch)
                batch = dataset.__getitems__(keys(4, 29, 0, 11, epoch=epoch))
                assert len(lengths) == len(dataset)
                assert lengths[[4, 29, 0, 11]].tolist() == batch["num_samples"].tolist()


def test_samples_depend_on_seed_epoch_and_index_not_on_the_batch(corpus, alphabet) -> None:
    for dataset in (Utterances(corpus, np.arange(NUM), alphabet, augmenter()), strings(corpus, alphabet, augmenter())):
        together = dataset.__getitems__(keys(8, 3, 1, epoch=2))
        for row, i in enumerate((8, 3, 1)):
            alone = dataset.__getitems__(keys(i, epoch=2))
            assert together.keys() == alone.keys()
            for name, values in alone.items():
                cut = tuple(slice(size) for size in values[0].shape)
                assert np.array_equal(together[name][row][cut], values[0])
        another = dataset.__getitems__(keys(8, 3, 1, epoch=3))
        assert not np.array_equal(another["num_samples"], together["num_samples"])
    plain = strings(corpus, alphabet, seed=1)
    first = plain.__getitems__(keys(0))["audio"]
    assert np.array_equal(first, strings(corpus, alphabet, seed=1).__getitems__(keys(0))["audio"])
    assert not np.array_equal(first[:, :300], strings(corpus, alphabet, seed=2).__getitems__(keys(0))["audio"][:, :300])


def test_augmentation_reaches_the_batch(corpus, alphabet) -> None:
    batch = strings(corpus, alphabet, augmenter()).__getitems__(keys(0, 1))
    assert {"warp", "freq_masks", "time_masks", "masking_db"} < batch.keys()
    assert batch["warp"].shape == (2,) and batch["freq_masks"].shape == batch["time_masks"].shape == (2, 2, 2)


def test_recordings_of_a_string_have_different_speeds_in_training(corpus, alphabet) -> None:
    only = replace(Augmentation().times(0.0), word_speed_percent=10)
    dataset = strings(corpus, alphabet, Augmenter(only, num_mels=40, seed=7))
    batch, changed = dataset.__getitems__(SampleKeys(np.arange(60), 0)), []
    for row, name in enumerate(names_of(dataset, np.arange(60))):
        audio = batch["audio"][row, : batch["num_samples"][row]]
        loud = audio > 0.35 * LOUD / 32768
        borders = np.flatnonzero(np.diff(np.concatenate([[False], loud, [False]]).astype(int)))
        lengths = [len(corpus.utterance(int(part.removesuffix(".wav")))) for part in name.split("+")]
        if len(borders) == 2 * len(lengths):  # every pair has a gap between them
            changed += (100 * (borders[1::2] - borders[::2]) / lengths).tolist()
    assert len(changed) > 200
    assert 88 < min(changed) < 92 and 108 < max(changed) < 112 and np.std(changed) > 5


def test_room_noise_stays_within_recordings(corpus, alphabet) -> None:
    quiet = Augmentation().times(0.0)
    index = SampleKeys(np.arange(300), 0)
    plain, noisy = (
        strings(corpus, alphabet, Augmenter(strength, num_mels=40, seed=7)).__getitems__(index)
        for strength in (quiet, replace(quiet, room_share=0.4, room_snr_db=(5.0, 15.0)))
    )
    ratios = []
    for row, length in enumerate(plain["num_samples"]):
        before, after = (batch["audio"][row, :length].astype(np.float64) for batch in (plain, noisy))
        is_speech = before > 0.35 * LOUD / 32768
        inside, outside = power(after[is_speech] - before[is_speech]), power(after[~is_speech] - before[~is_speech])
        if inside > 1e-4 * power(before[is_speech]):
            ratios.append(10 * np.log10(power(before[is_speech]) / inside))
            assert outside < 0.1 * inside  # only the string's noise changes, with its power
    assert 0.33 < len(ratios) / 300 < 0.47
    assert 3 < min(ratios) < 7 and 13 < max(ratios) < 18


def power(audio: np.ndarray) -> float:
    return float(np.mean(audio**2)) if len(audio) else 0.0
