import numpy as np
import pytest

from data.speech import synthetic
from data.speech.corpus import Corpus
from data.speech.synthetic import (
    _BANDWIDTHS,
    _FRAME,
    _LEXICON,
    _PHONES,
    NUM_SPEAKERS,
    NUM_UTTERANCES,
    SAMPLE_RATE,
    _resonate,
    generate,
    load_synthetic_corpus,
)
from data.speech.text import Alphabet, shortest_frames


@pytest.fixture(scope="module")
def corpus(cache_dir) -> Corpus:
    return load_synthetic_corpus(cache_dir)


def test_generated_data_are_reproducible_and_cached(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(synthetic, "NUM_UTTERANCES", {"train": 20, "val": 4, "test": 4})
    first, again = load_synthetic_corpus(tmp_path), generate()
    assert np.array_equal(again.audio, first.audio) and np.array_equal(again.offsets, first.offsets)
    assert (again.transcripts, again.speakers, again.splits) == (first.transcripts, first.speakers, first.splits)
    monkeypatch.setattr(synthetic, "generate", lambda: pytest.fail("not read from the cache"))
    assert np.array_equal(load_synthetic_corpus(tmp_path).audio, first.audio)


def test_no_speaker_is_in_two_splits(corpus) -> None:
    of_split = {
        split: {speaker for speaker, its in zip(corpus.speakers, corpus.splits, strict=True) if its == split}
        for split in NUM_UTTERANCES
    }
    assert {split: len(people) for split, people in of_split.items()} == NUM_SPEAKERS
    assert len(set.union(*of_split.values())) == sum(NUM_SPEAKERS.values())
    assert {split: corpus.splits.count(split) for split in NUM_UTTERANCES} == NUM_UTTERANCES
    assert len(set(corpus.names)) == len(corpus)


def test_sentences_follow_the_order_of_the_lexicon(corpus) -> None:
    place = {word: k for k, words in enumerate(_LEXICON) for word in words}
    seen = set()
    for transcript in corpus.transcripts:
        places = [place[word] for word in transcript.split()]
        assert places == sorted(set(places)) and {2, 3} <= set(places)
        seen.update(transcript.split())
    assert seen == place.keys()
    assert {len(transcript.split()) for transcript in corpus.transcripts} == {2, 3, 4, 5}


def test_words_use_the_phones_of_the_table() -> None:
    used = {phone for words in _LEXICON for phones in words.values() for phone in phones.split()}
    assert used == _PHONES.keys()


def test_each_utterance_is_long_enough_for_its_letters(corpus) -> None:
    """25 frames a second are the fewest that any encoder makes."""
    alphabet = Alphabet.from_transcripts(corpus.transcripts, "characters")
    frames = np.diff(corpus.offsets) / SAMPLE_RATE * 25
    needed = np.array([shortest_frames(alphabet.encode(transcript)) for transcript in corpus.transcripts])
    assert (frames / needed).min() > 1.1


def test_audio_is_neither_too_quiet_nor_clipped(corpus) -> None:
    for i in range(0, len(corpus), 10):
        audio = corpus.utterance(i) / 32768
        assert 0.015 < np.sqrt(np.mean(audio**2)) < 0.15
        assert np.mean(np.abs(audio) > 0.98) < 0.01


def test_resonances_lie_at_the_formants() -> None:
    """The spectrum of white noise through four resonances follows their product."""
    formants = np.array([700.0, 1200.0, 2500.0, 3500.0])
    source = np.random.default_rng(0).standard_normal(200_000, np.float32)
    sound = _resonate(source, np.tile(formants, (-(-len(source) // (_FRAME // 2)) + 1, 1)).astype(np.float32))
    assert sound.shape == source.shape
    spectrum = np.mean(np.abs(np.fft.rfft(sound[: 400 * 500].reshape(400, 500) * np.hanning(500))) ** 2, axis=0)
    hz2 = np.fft.rfftfreq(500, 1 / SAMPLE_RATE) ** 2
    expected = np.ones_like(hz2)
    for centre, bandwidth in zip(formants**2, _BANDWIDTHS, strict=True):
        expected *= centre**2 / ((hz2 - centre) ** 2 + hz2 * bandwidth**2)
    assert np.corrcoef(np.log(spectrum[2:-2]), np.log(expected[2:-2]))[0, 1] > 0.98
    flat = np.abs(np.fft.rfft(_resonate(source, np.full((3126, 4), 1e6, np.float32)))).mean()
    assert flat == pytest.approx(np.abs(np.fft.rfft(source)).mean(), rel=0.01)
