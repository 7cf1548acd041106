"""Reports on speech recognition: error rates, words with times, and pictures of utterances.

A space between words counts as one character; repeated, leading and trailing spaces do not count.
"""

import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from data.speech.text import Alphabet
from models.speech.edit_distance import EditCounts, align, count_edits
from tasks.pictures import BLACK, BLUE, GAP, GREY, PALE, SMALL, VERMILION, WHITE, WIDTH, drawable, font
from tasks.speech_objective import AlignedText

Colour = tuple[int, int, int]

# in pixels
LABELS = 40
SPECTROGRAM_HEIGHT, ROW_HEIGHT = 64, SMALL + 1
PLOT_WIDTH = WIDTH - LABELS - GAP
LINE_HEIGHT = SMALL + 3

MOST_ROWS, LEAST_PEAK = 16, 0.1
"""Maximum number of symbols to draw in addition to the blank, and the peak probability that a symbol must reach."""


def error_rates(said: Sequence[str], heard: Sequence[str]) -> dict[str, float]:
    """Returns word and character error rates ("wer", "cer"): edits per reference word or character, which can exceed 1.

    "string_error_rate" is the share of utterances with at least one error. said: references. heard: decoded texts.
    """
    words, characters = _edits(tuple(said), tuple(heard))
    return {
        "wer": float(words.edits.sum() / max(1, sum(len(text.split()) for text in said))),
        "cer": float(characters.edits.sum() / max(1, sum(len(_tidied(text)) for text in said))),
        "string_error_rate": float((characters.edits > 0).mean()) if len(said) else 0.0,
    }


def error_counts(said: Sequence[str], heard: Sequence[str]) -> dict[str, dict[str, int]]:
    """Returns the numbers of substitutions, deletions and insertions, for "words" and for "characters"."""
    counted = zip(("words", "characters"), _edits(tuple(said), tuple(heard)), strict=True)
    return {
        unit: {kind: int(count.sum()) for kind, count in zip(edits._fields, edits, strict=True)}
        for unit, edits in counted
    }


def worst_utterances(said: Sequence[str], heard: Sequence[str], count: int = 10) -> list[dict[str, Any]]:
    """Returns up to `count` utterances with errors, most word errors first, then most character errors.

    "index" is the position in `said`. "aligned" contains one line per text, with words in columns; stars mark gaps.
    """
    words, characters = _edits(tuple(said), tuple(heard))
    order = np.lexsort([-characters.edits, -words.edits])[:count].tolist()
    return [
        {
            "index": i,
            "said": _tidied(said[i]),
            "heard": _tidied(heard[i]),
            "word_edits": int(words.edits[i]),
            "character_edits": int(characters.edits[i]),
            "aligned": _aligned(said[i], heard[i]),
        }
        for i in order
        if characters.edits[i] > 0
    ]


@lru_cache(maxsize=1)
def _edits(said: tuple[str, ...], heard: tuple[str, ...]) -> tuple[EditCounts, EditCounts]:
    """Counts word edits and character edits, and caches the result."""
    of_words = count_edits([text.split() for text in said], [text.split() for text in heard])
    return of_words, count_edits([_tidied(text) for text in said], [_tidied(text) for text in heard])


def _tidied(text: str) -> str:
    return " ".join(text.split())


def _aligned(said: str, heard: str) -> list[str]:
    """Formats two texts as two lines in which corresponding words are aligned."""
    columns = [[str(edit.reference or ""), str(edit.hypothesis or "")] for edit in align(said.split(), heard.split())]
    widths = [max(map(len, column)) for column in columns]
    return [
        " ".join((column[row] or "*" * width).ljust(width) for column, width in zip(columns, widths, strict=True))
        for row in (0, 1)
    ]


class Word(NamedTuple):
    """Recognised word. start_s, end_s: in seconds. confidence: lowest confidence of its symbols, in [0, 1]."""

    text: str
    start_s: float
    end_s: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.text} {self.start_s:.2f}-{self.end_s:.2f} {self.confidence:.2f}"


def timed_words(text: AlignedText, alphabet: Alphabet, frame_s: float, duration_s: float) -> list[Word]:
    """Groups the symbols of a text into words with times. frame_s: seconds per frame.

    duration_s: length of the recording in seconds; times do not exceed it, although the last frame may end later.
    """
    words: list[Word] = []
    begins = True
    for number, start, end, confidence in zip(text.ids, *text.aligned, strict=True):
        symbol = alphabet.symbols[number - 1]
        if symbol == " ":
            begins = True
            continue
        start_s, end_s = (float(min(frame * frame_s, duration_s)) for frame in (start, end))
        if begins:
            words.append(Word(symbol, start_s, end_s, float(confidence)))
        else:
            last = words[-1]
            words[-1] = Word(last.text + symbol, last.start_s, end_s, min(last.confidence, float(confidence)))
        begins = alphabet.units == "words"
    return words


def draw_utterances(
    features: Tensor,
    num_frames: Tensor,
    log_probs: Tensor,
    lengths: Tensor,
    symbols: Sequence[str],
    *,
    said: Sequence[str],
    decoded: Sequence[str],
    frames_per_second: float,
) -> np.ndarray:
    """Draws the text, log-mel spectrogram and symbol probabilities of each utterance, as (height, WIDTH, 3) uint8.

    Darker pixels are louder or more probable.

    features: (B, T, F), low frequencies first. num_frames: (B,), valid frames of features. log_probs: (B, T', V);
    symbol 0 is the blank. lengths: (B,), valid frames of log_probs. symbols: names of symbols 1 to V - 1. said,
    decoded: B texts.
    """
    heard, shares = (values.detach().double().cpu().numpy() for values in (features, log_probs.exp()))
    names = ["blank", *symbols]
    return np.concatenate(
        [
            _draw_block(heard[i, :n], n / frames_per_second, shares[i, :length], names, _lines(said[i], decoded[i]))
            for i, (n, length) in enumerate(zip(num_frames.tolist(), lengths.tolist(), strict=True))
        ]
    )


def _draw_block(
    features: np.ndarray, seconds: float, shares: np.ndarray, names: Sequence[str], lines: list[tuple[str, Colour]]
) -> np.ndarray:
    """Draws one utterance. features: (T, F). seconds: duration. shares: (T', V), probabilities. names: V symbols."""
    rows = _rows(shares)
    top = GAP + len(lines) * LINE_HEIGHT
    below = top + SPECTROGRAM_HEIGHT + GAP
    bottom = below + len(rows) * ROW_HEIGHT
    image = Image.new("RGB", (WIDTH, bottom + LINE_HEIGHT + GAP), WHITE)
    draw = ImageDraw.Draw(image)
    for i, (text, colour) in enumerate(lines):
        draw.text((GAP, GAP + i * LINE_HEIGHT), text, colour, font(SMALL))
    _paste(image, _between_0_and_1(features).T[::-1], BLACK, top, SPECTROGRAM_HEIGHT)
    _paste(image, shares[:, rows].T, BLUE, below, bottom - below)
    for i, symbol in enumerate(rows):
        y = below + i * ROW_HEIGHT
        draw.line((LABELS, y, WIDTH - GAP, y), PALE)
        draw.text((LABELS - GAP, y + ROW_HEIGHT / 2), _label(names[symbol]), BLACK, font(SMALL), anchor="rm")
    draw.text((LABELS, bottom + 2), "0 s", GREY, font(SMALL))
    draw.text((WIDTH - GAP, bottom + 2), f"{seconds:.2f} s", GREY, font(SMALL), anchor="ra")
    return np.asarray(image)


def _lines(said: str, decoded: str) -> list[tuple[str, Colour]]:
    """Returns (line, colour) pairs that compare the decoded text with the spoken text."""
    if said == decoded:
        texts = [(f"right: {decoded}", BLUE)]
    else:
        texts = [(f"heard: {decoded}", VERMILION), (f"said: {said}", GREY)]
    return [(line, colour) for text, colour in texts for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    """Wraps text to about 90 % of the picture's width."""
    text = drawable(text)
    mean_width = font(SMALL).getlength(text) / len(text)
    return textwrap.wrap(text, int(0.9 * (WIDTH - 2 * GAP) / mean_width))


def _rows(shares: np.ndarray) -> list[int]:
    """Returns the blank and the symbols to draw, in the order in which they first reach half their peak probability."""
    peaks = shares.max(axis=0, initial=0)
    peaks[0] = 0
    drawn = [int(symbol) for symbol in np.argsort(-peaks, kind="stable")[:MOST_ROWS] if peaks[symbol] >= LEAST_PEAK]
    return [0, *sorted(drawn, key=lambda symbol: int((shares[:, symbol] >= peaks[symbol] / 2).argmax()))]


def _label(name: str) -> str:
    """Shortens a symbol's name to the available width; a space becomes "space"."""
    name = "space" if name == " " else drawable(name)
    while font(SMALL).getlength(name) > LABELS - 2 * GAP:
        name = name[:-1]
    return name


def _between_0_and_1(values: np.ndarray) -> np.ndarray:
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    return (values - low) / max(high - low, 1e-12)


def _paste(image: Image.Image, shades: np.ndarray, colour: Colour, top: int, height: int) -> None:
    """Draws an array as a heat map. shades: (rows, columns), from 0 (white) to 1 (`colour`)."""
    white, ink = np.array(WHITE), np.array(colour)
    pixels = (white + (ink - white) * shades[..., None]).round().astype(np.uint8)
    if pixels.size:
        resized = Image.fromarray(pixels).resize((PLOT_WIDTH, height), Image.Resampling.BOX)
        image.paste(resized, (LABELS, top))
