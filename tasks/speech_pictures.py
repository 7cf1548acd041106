"""A picture of utterances: what the model heard, and below it which symbol it took each moment for.

Lightness alone tells values apart.
"""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from tasks.drawing import BLACK, BLUE, GAP, GREY, PALE, SMALL, VERMILION, WHITE, WIDTH, drawable, font

Colour = tuple[int, int, int]

# In pixels.
LABELS = 40
SPECTROGRAM_HEIGHT, ROW_HEIGHT = 64, SMALL + 1
PLOT_WIDTH = WIDTH - LABELS - GAP
LINE_HEIGHT = SMALL + 3

MOST_ROWS, LEAST_PEAK = 16, 0.1
"""Of symbols besides the blank: drawn are so many, those with the highest probabilities that reach this anywhere."""


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
    """One block below the other: text, log-mel spectrogram, probability of each symbol. (height, WIDTH, 3) uint8.

    The darker, the louder, and the more probable.

    features: (B, T, F), from low to high frequencies. num_frames: (B,), frames of each, so many in a second.
    log_probs: (B, T', V), symbol 0 the blank. lengths: (B,), their frames. symbols: (V - 1,), names of the others.
    said, decoded: (B,) transcripts.
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
    """features: (T, F), which last `seconds`. shares: (T', V) probabilities. names: (V,)."""
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
    """Text and its colour; words say what the colours say."""
    if said == decoded:
        texts = [(f"right: {decoded}", BLUE)]
    else:
        texts = [(f"heard: {decoded}", VERMILION), (f"said: {said}", GREY)]
    return [(line, colour) for text, colour in texts for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    """Lines that fit into the picture: as many characters as do on average, less a tenth."""
    text = drawable(text)
    mean_width = font(SMALL).getlength(text) / len(text)
    return textwrap.wrap(text, int(0.9 * (WIDTH - 2 * GAP) / mean_width))


def _rows(shares: np.ndarray) -> list[int]:
    """The symbols to draw: the blank, then the others as they first reach half of their highest probability."""
    peaks = shares.max(axis=0, initial=0)
    peaks[0] = 0
    drawn = [int(symbol) for symbol in np.argsort(-peaks, kind="stable")[:MOST_ROWS] if peaks[symbol] >= LEAST_PEAK]
    return [0, *sorted(drawn, key=lambda symbol: int((shares[:, symbol] >= peaks[symbol] / 2).argmax()))]


def _label(name: str) -> str:
    """As much of a symbol's name as there is space for; a space by that word."""
    name = "space" if name == " " else drawable(name)
    while font(SMALL).getlength(name) > LABELS - 2 * GAP:
        name = name[:-1]
    return name


def _between_0_and_1(values: np.ndarray) -> np.ndarray:
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    return (values - low) / max(high - low, 1e-12)


def _paste(image: Image.Image, shades: np.ndarray, colour: Colour, top: int, height: int) -> None:
    """shades: (rows, columns), from 0, white, to 1, the colour; stretched over the width of the plot."""
    white, ink = np.array(WHITE), np.array(colour)
    pixels = (white + (ink - white) * shades[..., None]).round().astype(np.uint8)
    if pixels.size:
        resized = Image.fromarray(pixels).resize((PLOT_WIDTH, height), Image.Resampling.BOX)
        image.paste(resized, (LABELS, top))
