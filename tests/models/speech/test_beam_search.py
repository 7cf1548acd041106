"""Tests prefix beam search against sums over all alignments, and against dictionaries of prefixes."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from models.speech.beam_search import beam_search
from models.speech.language_model import build_scorer, read_arpa
from tests.models.speech.arpa import estimated_arpa

SYMBOLS = ("", "a", "b", " ")
WORDS = [line.split() for line in ["a ab", "b a b", "ab ba a", "a"]]
LETTERS = [["a", "<space>", "a", "b"], ["b", "b", "<space>"], ["a"]]


def make_frames(batch_size, num_frames, num_symbols=4, seed=0):
    logits = 1.5 * np.random.default_rng(seed).normal(size=(batch_size, num_frames, num_symbols))
    return logits - np.logaddexp.reduce(logits, axis=2, keepdims=True)


def merged(path):
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != 0)


def sums_over_alignments(frames):
    """Returns the log-probability of every transcript of one utterance, given frames of shape (T, V)."""
    total = defaultdict(float)
    for path in itertools.product(range(frames.shape[1]), repeat=len(frames)):
        total[merged(path)] += math.exp(sum(frame[symbol] for frame, symbol in zip(frames, path, strict=True)))
    return {ids: math.log(value) for ids, value in total.items()}


def slow_beam_search(frames, width, num_tried, added=lambda ids: 0.0):
    """Searches one utterance with a dictionary of prefixes. added: returns the bonus of a prefix during the search."""
    beam = {(): (1.0, 0.0)}
    for frame in np.exp(frames):
        tried = np.argsort(-frame[1:])[:num_tried] + 1
        after = defaultdict(lambda: [0.0, 0.0])
        for ids, (blank, symbol) in beam.items():
            after[ids][0] += (blank + symbol) * frame[0]
            if ids:
                after[ids][1] += symbol * frame[ids[-1]]
            for i in range(1, len(frame)):
                if i in tried or (*ids, i) in beam:
                    after[*ids, i][1] += (blank if ids[-1:] == (i,) else blank + symbol) * frame[i]
        alive = {ids: pair for ids, pair in after.items() if sum(pair) > 0}
        best = sorted(alive, key=lambda ids: -(math.log(sum(alive[ids])) + added(ids)))[:width]
        beam = {ids: alive[ids] for ids in best}
    return {ids: math.log(sum(pair)) for ids, pair in beam.items()}


def as_dict(hypotheses):
    scores = dict(hypotheses)
    assert len(scores) == len(hypotheses), "a transcript comes twice"
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    return scores


def test_a_large_beam_sums_over_all_alignments():
    frames, lengths = make_frames(4, 6), np.array([4, 6, 0, 1])
    for row, length, hypotheses in zip(frames, lengths, beam_search(frames, lengths, 1000), strict=True):
        expected = sums_over_alignments(row[:length])
        assert as_dict(hypotheses) == pytest.approx(expected, rel=0, abs=1e-12)
        assert sum(map(math.exp, expected.values())) == pytest.approx(1)


@pytest.mark.parametrize("width", [1, 2, 5, 16])
@pytest.mark.parametrize("num_tried", [1, 2, None])
def test_a_small_beam_equals_a_prefix_dictionary(width, num_tried):
    frames, lengths = make_frames(6, 25, 4, seed=width), np.array([25, 25, 3, 18, 24, 1])
    found = beam_search(frames, lengths, width, symbols_per_frame=num_tried)
    for row, length, hypotheses in zip(frames, lengths, found, strict=True):
        expected = slow_beam_search(row[:length], width, num_tried or 3)
        assert as_dict(hypotheses) == pytest.approx(expected, rel=0, abs=1e-9)


def test_padding_and_other_samples_change_nothing():
    frames, lengths = make_frames(5, 20), np.array([7, 20, 12, 1, 20])
    padded = frames.copy()
    padded[np.arange(20) >= lengths[:, None]] = np.nan
    together = beam_search(padded, lengths, 6)
    alone = [beam_search(frames[i : i + 1, :n], lengths[i : i + 1], 6)[0] for i, n in enumerate(lengths)]
    assert together == alone


def test_every_utterance_gets_a_transcript():
    """One utterance has no frames, one comes from a diverged model, and one has fewer prefixes than the beam keeps."""
    frames = np.concatenate([make_frames(1, 2), np.full((1, 2, 4), np.nan), make_frames(1, 2)])
    counts = [len(hypotheses) for hypotheses in beam_search(frames, np.array([0, 2, 1]), 8)]
    assert counts == [1, 1, 4]


def test_a_beam_of_one_prefix_differs_from_greedy():
    """Greedy decoding gives two blanks, but "a" has more alignments: a-, -a and aa."""
    frames = np.log([[[0.5, 0.4, 0.1], [0.5, 0.4, 0.1]]])
    widths = {width: beam_search(frames, np.array([2]), width)[0][0].ids for width in (1, 2)}
    assert widths[2] == (1,)
    stays = np.log([[[0.3, 0.4, 0.3], [0.35, 0.25, 0.4]]])
    (hypothesis,) = beam_search(stays, np.array([2]), 1)[0]
    assert stays[0].argmax(1).tolist() == [1, 2] and hypothesis.ids == (1,)


def slow_bonus(ngram, ids, weight, bonus, words, is_complete):
    """Returns what a transcript's units add to its score, unit by unit."""
    text = "".join(SYMBOLS[i] for i in ids)
    if words:
        begun = text.split(" ")
        units = [word for word in (begun if is_complete else begun[:-1]) if word]
    else:
        units = ["<space>" if letter == " " else letter for letter in text]
    ends = ["</s>"] if is_complete else []
    total = bonus * len(units)
    for i, unit in enumerate([*units, *ends]):
        total += weight * ngram.score(["<s>", *units[:i]], unit)
    return total


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("words", [True, False])
def test_a_language_model_adds_its_weighted_score_and_the_bonus_of_each_unit(tmp_path, order, words):
    path = tmp_path / "model.arpa"
    path.write_text(estimated_arpa(WORDS if words else LETTERS, order))
    ngram, weight, bonus = read_arpa(path), 0.7, 0.3
    scorer = build_scorer(ngram, SYMBOLS, weight, bonus)
    frames, lengths = make_frames(3, 6, seed=order), np.array([6, 4, 5])
    for row, length, hypotheses in zip(frames, lengths, beam_search(frames, lengths, 2000, scorer=scorer), strict=True):
        expected = {
            ids: value + slow_bonus(ngram, ids, weight, bonus, words, is_complete=True)
            for ids, value in sums_over_alignments(row[:length]).items()
        }
        assert as_dict(hypotheses) == pytest.approx(expected, rel=0, abs=1e-9)

    def added(ids):
        return slow_bonus(ngram, ids, weight, bonus, words, is_complete=False)

    for row, length, hypotheses in zip(frames, lengths, beam_search(frames, lengths, 4, scorer=scorer), strict=True):
        kept = slow_beam_search(row[:length], 4, 3, added)
        expected = {ids: v + slow_bonus(ngram, ids, weight, bonus, words, is_complete=True) for ids, v in kept.items()}
        assert as_dict(hypotheses) == pytest.approx(expected, rel=0, abs=1e-9)


def test_a_bonus_without_a_language_model_counts_symbols():
    frames, lengths = make_frames(2, 5), np.array([5, 3])
    plain = beam_search(frames, lengths, 1000)
    longer = beam_search(frames, lengths, 1000, scorer=build_scorer(None, SYMBOLS, bonus=0.5))
    for before, after in zip(plain, longer, strict=True):
        expected = {ids: value + 0.5 * len(ids) for ids, value in before}
        assert as_dict(after) == pytest.approx(expected, rel=0, abs=1e-12)
