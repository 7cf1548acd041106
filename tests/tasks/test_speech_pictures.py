"""How utterances are drawn: text, spectrogram, and the probability of each symbol over time."""

import numpy as np
import pytest
import torch

from tasks.drawing import BLACK, BLUE, GAP, WHITE, WIDTH
from tasks.speech_pictures import (
    LABELS,
    LINE_HEIGHT,
    MOST_ROWS,
    PLOT_WIDTH,
    ROW_HEIGHT,
    SPECTROGRAM_HEIGHT,
    VERMILION,
    draw_utterances,
)

TOP = GAP + LINE_HEIGHT
BELOW = TOP + SPECTROGRAM_HEIGHT + GAP


def drawn(path, features=None, said="a", decoded="a", symbols=("a", " ", "c")):
    """One utterance, amid padding. path: the one symbol that is probable in each frame."""
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
    """The colour in the middle of a row of the plot, at a share of its width."""
    return tuple(picture[round(top + height / 2), round(LABELS + share * PLOT_WIDTH)].tolist())


def test_a_symbol_is_blue_where_it_is_probable_and_rows_are_in_the_order_of_time():
    picture = drawn([0, 3, 0, 1])
    rows = [
        [middle(picture, BELOW + i * ROW_HEIGHT, ROW_HEIGHT, (t + 0.5) / 4) for t in range(4)] for i in range(3)
    ]  # blank, c, a
    assert rows == [[BLUE, WHITE, BLUE, WHITE], [WHITE, BLUE, WHITE, WHITE], [WHITE, WHITE, WHITE, BLUE]]


def test_only_symbols_that_are_probable_somewhere_have_a_row():
    heights = {num: len(drawn(list(range(num)), symbols=["n"] * 39)) for num in (1, 2, 5, 40)}
    assert heights[2] - heights[1] == ROW_HEIGHT
    assert heights[5] - heights[1] == 4 * ROW_HEIGHT
    assert heights[40] - heights[1] == MOST_ROWS * ROW_HEIGHT


def test_loud_is_dark_and_high_frequencies_are_on_top():
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
def test_text_of_any_length_stays_within_the_picture(text):
    picture = drawn([0], said="c", decoded=text)
    assert not has(picture[:, -GAP + 1 :], VERMILION)


def test_several_utterances_are_drawn_below_each_other():
    torch.manual_seed(0)
    features, log_probs = torch.randn(3, 9, 5), torch.randn(3, 6, 4).log_softmax(2)
    num_frames, lengths, texts = torch.tensor([9, 4, 7]), torch.tensor([5, 2, 6]), ["a", "b a", ""]

    def block(first, last):
        here = slice(first, last)
        tensors = [values[here] for values in (features, num_frames, log_probs, lengths)]
        return draw_utterances(*tensors, "abc", said=texts[here], decoded=["a"] * (last - first), frames_per_second=100)

    assert np.array_equal(block(0, 3), np.concatenate([block(i, i + 1) for i in range(3)]))


def test_an_utterance_without_frames():
    assert len(drawn([], torch.zeros(0, 3))) > BELOW
