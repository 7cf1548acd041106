"""Tests scores of ARPA files against values by hand, that probabilities add up to 1, and refusals of wrong files."""

import gzip
import itertools
import math

import numpy as np
import pytest

from models.speech.language_model import NGram, SymbolScorer, WordScorer, build_scorer, read_arpa
from tests.models.speech.arpa import estimated_arpa

SENTENCES = [line.split() for line in ["a b a", "b a b b", "c a", "a a b c", "c"]]

BY_HAND = """Made by hand.

\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1\t<s>\t-0.5
-0.25 a -0.125
-0.75\tb
-2\t<unk>

\\2-grams:
-0.0625\t<s> a
-0.03125\ta b

\\end\\
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "model.arpa"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("history", "word", "log10"),
    [
        (["<s>"], "a", -0.0625),
        (["<s>"], "b", -0.5 - 0.75),  # backs off
        (["b"], "a", -0.25),  # no back-off weight
        (["<s>", "b", "a"], "b", -0.03125),  # only the last word of the history counts
        (["a"], "z", -0.125 - 2),  # unknown word
        (["z"], "b", -0.75),
        ([], "a", -0.25),
    ],
)
def test_scores_equal_values_by_hand(written, history, word, log10):
    assert read_arpa(written(BY_HAND)).score(history, word) == pytest.approx(log10 * math.log(10), rel=1e-15)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_sum_to_one_after_every_history(written, order):
    ngram = read_arpa(written(estimated_arpa(SENTENCES, order)))
    assert ngram.order == order and ngram.vocabulary == {"a", "b", "c"}
    words = [*ngram.vocabulary, "</s>", "<unk>"]
    for length in range(4):
        for history in itertools.product(["a", "b", "c", "z"], repeat=length):
            total = sum(math.exp(ngram.score(["<s>", *history], word)) for word in words)
            assert total == pytest.approx(1, rel=1e-9), history


def test_a_word_missing_from_a_closed_language_model_scores_low(written):
    text = BY_HAND.replace("-2\t<unk>\n", "").replace("1=4", "1=3")
    assert read_arpa(written(text)).score(["<s>"], "z") == pytest.approx((-0.5 - 100) * math.log(10))


def test_a_compressed_file_is_read(tmp_path, written):
    path = tmp_path / "model.arpa.gz"
    path.write_bytes(gzip.compress(BY_HAND.encode()))
    assert read_arpa(path) == read_arpa(written(BY_HAND))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\\data\\", "\\date\\", r"the line \data\ is missing, so the file is truncated or not an ARPA file"),
        ("\\end\\", "", r"the line \end\ is missing, so the file is truncated or not an ARPA file"),
        ("1=4", "1=5", r"line 17: the file has 4 entries of order 1, but its section \data\ announces 5"),
        ("ngram 2=2", "", r"line 17: the file has 2 entries of order 2, but its section \data\ announces 0"),
        ("ngram 2=2", "2 bigrams", "line 5: '2 bigrams' does not have the form ngram ORDER=COUNT"),
        ("-0.25 a", "-0,25 a", "line 9: -0,25 is not a log10 probability, or -0.125 is not a log10 backoff"),
        ("-0.25 a", "0.25 a", "line 9: 0.25 is not a log10 probability, or -0.125 is not a log10 backoff"),
        ("-0.25 a -0.125", "-0.25 a nan", "line 9: -0.25 is not a log10 probability, or nan is"),
        ("\ta b\n", "\ta b c d\n", "must be a log10 probability, 2 words and optionally a back"),
        ("-0.75\tb", "-0.75\ta", "line 10: 'a' occurs twice"),
    ],
)
def test_errors_in_a_file_are_named(written, old, new, said):
    assert old in BY_HAND
    with pytest.raises(ValueError) as raised:
        read_arpa(written(BY_HAND.replace(old, new, 1)))
    assert said.strip() in str(raised.value)


@pytest.mark.parametrize("content", [b"\\data\\\n\xff\n", gzip.compress(BY_HAND.encode(), mtime=0)[:-30], b"no gzip"])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / ("model.arpa" if content[:1] == b"\\" else "model.arpa.gz")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged, or is not text in UTF-8"):
        read_arpa(path)


def test_the_vocabulary_decides_whether_words_or_symbols_are_scored(written):
    ngram = read_arpa(written(BY_HAND))
    assert isinstance(build_scorer(ngram, ["", "a", "b", "c", " "]), SymbolScorer)
    assert isinstance(build_scorer(ngram, ["", "a"]), SymbolScorer)  # the model may know more symbols than the alphabet
    mixed = NGram(1, {("ab",): (-1.0, 0.0), ("THE",): (-1.0, 0.0)})
    assert isinstance(build_scorer(mixed, ["", "a", "b", " "]), WordScorer)
    words = NGram(1, {("THE",): (-1.0, 0.0)})
    for symbols in (["", "t", "h", "e", " "], ["", "the"]):
        with pytest.raises(ValueError, match="words such as 'THE', which the lower-case alphabet cannot spell"):
            build_scorer(words, symbols)


def test_a_new_search_discards_states_of_the_previous_one(written):
    """Otherwise the states would grow with every utterance."""
    scorer = build_scorer(read_arpa(written(BY_HAND)), ["", "a", "b", " "])
    for symbol in (1, 2, 1):
        start = np.array([scorer.begin()])
        assert scorer.advance(start, np.array([symbol])).tolist() == [1]
        assert scorer.scores(np.array([1])).shape == (1, 4)
