"""Words with their times, from symbols with theirs."""

import numpy as np
import pytest

from data.speech.text import Alphabet
from models.speech.alignment import align
from tasks.speech_decoder import AlignedText
from tasks.speech_words import Word, timed_words

SYMBOLS = (" ", "a", "b")


def sure_of(path: str, confidence: float = 0.9) -> np.ndarray:
    """Log-probabilities of one symbol a frame; '-' is the blank."""
    shares = np.full((len(path), 4), (1 - confidence) / 3)
    for frame, symbol in enumerate(path):
        shares[frame, ("-", *SYMBOLS).index(symbol)] = confidence
    return np.log(shares)


def words_of(path: str, ids: list[int], units: str = "characters", duration_s: float = 9.0) -> list[Word]:
    text = AlignedText(np.array(ids, np.int64), align(sure_of(path), np.array(ids, np.int64)))
    return timed_words(text, Alphabet(units, SYMBOLS), 0.1, duration_s)


def test_spaces_separate_words_of_characters():
    first, second = words_of("-aab- -a-", [2, 3, 1, 2])
    assert (first.text, second.text) == ("ab", "a")
    assert (first.start_s, first.end_s) == pytest.approx((0.1, 0.4))
    assert (second.start_s, second.end_s) == pytest.approx((0.7, 0.8))
    assert first.confidence == pytest.approx(0.9) and str(second) == "a 0.70-0.80 0.90"


def test_each_symbol_is_a_word_of_words():
    assert [word.text for word in words_of("aa-b", [2, 3], "words")] == ["a", "b"]


def test_the_least_sure_symbol_counts():
    log_probs = sure_of("aab")
    log_probs[2] = np.log([0.2, 0.1, 0.1, 0.6])
    ids = np.array([2, 3])
    (word,) = timed_words(AlignedText(ids, align(log_probs, ids)), Alphabet("characters", SYMBOLS), 0.1, 9.0)
    assert word.confidence == pytest.approx(0.6)


def test_no_word_ends_behind_the_recording():
    (word,) = words_of("-aa", [2], duration_s=0.25)
    assert (word.start_s, word.end_s) == pytest.approx((0.1, 0.25))
    assert words_of("--", []) == []
