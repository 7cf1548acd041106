"""Tests error rates of a set, its worst utterances, words with their times, and pictures of utterances."""

import json

import numpy as np
import pytest
import torch

from data.speech.text import Alphabet
from models.speech.alignment import align
from tasks.pictures import BLACK, BLUE, GAP, WHITE, WIDTH
from tasks.speech_objective import AlignedText
from tasks.speech_report import (
    LABELS,
    LINE_HEIGHT,
    MOST_ROWS,
    PLOT_WIDTH,
    ROW_HEIGHT,
    SPECTROGRAM_HEIGHT,
    VERMILION,
    Word,
    draw_utterances,
    error_counts,
    error_rates,
    timed_words,
    worst_utterances,
)

SAID = ["one two three", "four", "", "five six", "seven"]
HEARD = ["one too three", "four", "nine", "six", "seven eight nine"]


def test_error_rates_divide_all_edits_by_all_reference_symbols():
    rates = error_rates(SAID, HEARD)
    num_words, num_characters = 3 + 1 + 0 + 2 + 1, 13 + 4 + 0 + 8 + 5
    assert rates == {
        "wer": pytest.approx((1 + 0 + 1 + 1 + 2) / num_words),
        "cer": pytest.approx((1 + 0 + 4 + 5 + 11) / num_characters),  # spaces count
        "string_error_rate": 4 / 5,
    }


def test_error_rates_do_not_depend_on_order_or_spaces():
    tidy = error_rates(SAID, HEARD)
    assert error_rates(SAID[::-1], HEARD[::-1]) == pytest.approx(tidy)
    assert error_rates(SAID, [f"  {text.replace(' ', '   ')} " for text in HEARD]) == tidy


def test_error_rates_of_silence_count_insertions():
    assert error_rates([], []) == {"wer": 0, "cer": 0, "string_error_rate": 0}
    assert error_rates(["", ""], ["", "a b"]) == {"wer": 2, "cer": 3, "string_error_rate": 0.5}


def test_edits_of_each_kind_are_counted():
    counts = error_counts(SAID, HEARD)
    assert counts["words"] == {"substitutions": 1, "deletions": 1, "insertions": 3}
    assert counts["characters"] == {"substitutions": 1, "deletions": 5, "insertions": 15}


def test_the_worst_utterances_come_first_and_correct_ones_are_omitted():
    worst = worst_utterances(SAID, HEARD)
    assert [entry["index"] for entry in worst] == [4, 3, 2, 0]
    assert [(entry["word_edits"], entry["character_edits"]) for entry in worst] == [(2, 11), (1, 5), (1, 4), (1, 1)]
    assert worst_utterances(SAID, HEARD, count=2) == worst[:2]
    assert json.loads(json.dumps(worst)) == worst


def test_words_are_aligned_below_each_other():
    by_index = {entry["index"]: entry["aligned"] for entry in worst_utterances(SAID, HEARD)}
    assert by_index == {
        0: ["one two three", "one too three"],
        2: ["****", "nine"],
        3: ["five six", "**** six"],
        4: ["seven ***** ****", "seven eight nine"],
    }


SYMBOLS = (" ", "a", "b")


def sure_of(path: str, confidence: float = 0.9) -> np.ndarray:
    """Returns log-probabilities, (frames, symbols), with one probable symbol a frame; '-' is the blank."""
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


def test_each_symbol_is_a_word():
    assert [word.text for word in words_of("aa-b", [2, 3], "words")] == ["a", "b"]


def test_a_words_confidence_is_its_least_certain_symbols():
    log_probs = sure_of("aab")
    log_probs[2] = np.log([0.2, 0.1, 0.1, 0.6])
    ids = np.array([2, 3])
    (word,) = timed_words(AlignedText(ids, align(log_probs, ids)), Alphabet("characters", SYMBOLS), 0.1, 9.0)
    assert word.confidence == pytest.approx(0.6)


def test_no_word_ends_after_the_recording():
    (word,) = words_of("-aa", [2], duration_s=0.25)
    assert (word.start_s, word.end_s) == pytest.approx((0.1, 0.25))
    assert words_of("--", []) == []


TOP = GAP + LINE_HEIGHT
BELOW = TOP + SPECTROGRAM_HEIGHT + GAP


def drawn(path, features=None, said="a", decoded="a", symbols=("a", " ", "c")):
    """Draws one utterance with padding. path: the one symbol that is probable in each frame."""
    features = torch.zeros(2, 2) if features is None else features
    log_probs = torch.full((1, len(path) + 3, len(symbols) + 1), -30.0)
    log_probs[0, torch.arange(len(path)), torch.tensor(path, dtype=torch.int64)] = 0
    log_probs[0, len(path) :, -1] = 0
    padded = torch.cat([features, torch.full((3, features.shape[1]), 9.0)]).unsqueeze(0)
    num_frames, lengths = torch.tensor([len(features)]), torch.tensor([len(path)])
    picture = draw_utterances(
        padded, num_frames, log_probs, lengths, symbols, said=[said], decoded=[decoded], frames_per_second=100
    )
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[1:] == (WIDTH, 3)
    return picture


def has(area, colour):
    return (area == np.array(colour)).all(axis=-1).any()


def middle(picture, top, height, share):
    """Returns the colour in the middle of a row of the plot, at a share of its width."""
    return tuple(picture[round(top + height / 2), round(LABELS + share * PLOT_WIDTH)].tolist())


def test_probable_symbols_are_blue_and_rows_follow_time():
    picture = drawn([0, 3, 0, 1])
    rows = [
        [middle(picture, BELOW + i * ROW_HEIGHT, ROW_HEIGHT, (t + 0.5) / 4) for t in range(4)] for i in range(3)
    ]  # blank, c, a
    assert rows == [[BLUE, WHITE, BLUE, WHITE], [WHITE, BLUE, WHITE, WHITE], [WHITE, WHITE, WHITE, BLUE]]


def test_only_probable_symbols_have_a_row():
    heights = {num: len(drawn(list(range(num)), symbols=["n"] * 39)) for num in (1, 2, 5, 40)}
    assert heights[2] - heights[1] == ROW_HEIGHT
    assert heights[5] - heights[1] == 4 * ROW_HEIGHT
    assert heights[40] - heights[1] == MOST_ROWS * ROW_HEIGHT


def test_spectrograms_show_loud_as_dark_and_high_frequencies_on_top():
    features = torch.tensor([[0.0, 0.0], [0.0, 1.0]])  # the second half is loud at high frequencies
    picture = drawn([0], features)
    half = SPECTROGRAM_HEIGHT // 2
    assert [middle(picture, TOP, half, share) for share in (0.25, 0.75)] == [WHITE, BLACK]
    assert [middle(picture, TOP + half, half, share) for share in (0.25, 0.75)] == [WHITE, WHITE]


def test_right_and_wrong_transcripts_differ_in_colour_and_in_words():
    right, wrong = (drawn([0], said="a c", decoded=decoded) for decoded in ("a c", "a"))
    assert has(right[:TOP], BLUE) and not has(right[:TOP], VERMILION)
    assert has(wrong[:TOP], VERMILION) and not has(wrong[:TOP], BLUE)
    assert len(wrong) - len(right) == LINE_HEIGHT


@pytest.mark.parametrize("text", ["", "a " * 200, "w" * 300])
def test_text_of_any_length_fits_into_the_picture(text):
    picture = drawn([0], said="c", decoded=text)
    assert not has(picture[:, -GAP + 1 :], VERMILION)


def test_several_utterances_are_drawn_one_below_another():
    torch.manual_seed(0)
    features, log_probs = torch.randn(3, 9, 5), torch.randn(3, 6, 4).log_softmax(2)
    num_frames, lengths, texts = torch.tensor([9, 4, 7]), torch.tensor([5, 2, 6]), ["a", "b a", ""]

    def block(first, last):
        here = slice(first, last)
        tensors = [values[here] for values in (features, num_frames, log_probs, lengths)]
        return draw_utterances(*tensors, "abc", said=texts[here], decoded=["a"] * (last - first), frames_per_second=100)

    assert np.array_equal(block(0, 3), np.concatenate([block(i, i + 1) for i in range(3)]))


def test_an_utterance_without_frames_can_be_drawn():
    assert len(drawn([], torch.zeros(0, 3))) > BELOW
