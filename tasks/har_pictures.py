"""Draws windows of sensor signals with the model's predictions."""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from data.har.windows import SIGNALS, triplets_first
from tasks.pictures import (
    BLACK,
    BLUE,
    GAP,
    GREEN,
    GREY,
    MEDIUM,
    PALE,
    SMALL,
    VERMILION,
    WHITE,
    WIDTH,
    drawable,
    font,
)

AXES = ("x", "y", "z")
UCI_PANELS = ("acceleration", "rotation", "with gravity")
MOST_PANELS = 6

AXIS_COLOURS = (BLUE, VERMILION, GREEN)

# in pixels
COLUMNS, PANEL_HEIGHT = 2, 28
PANEL_WIDTH = (WIDTH - GAP) // COLUMNS - GAP
TITLE_HEIGHT = MEDIUM + SMALL + GAP

Panels = Mapping[str, Sequence[int]]
"""Maps the name of each panel (a small plot) to the channels it shows: a sensor's x, y and z, or a single channel."""


def panels_of(channels: Sequence[str]) -> Panels:
    """Returns up to MOST_PANELS panels: three-axis sensors first, then single channels."""
    if tuple(channels) == SIGNALS:
        return {name: range(3 * i, 3 * i + 3) for i, name in enumerate(UCI_PANELS)}
    num_triplets = triplets_first(channels)[1]
    triplets = {channels[i][:-1].rstrip("_-. ") or "xyz": range(i, i + 3) for i in range(0, 3 * num_triplets, 3)}
    others = {channels[i]: (i,) for i in range(3 * num_triplets, len(channels))}
    return dict(islice((triplets | others).items(), MOST_PANELS))


def block_height(num_panels: int) -> int:
    """Returns the height of a window in the picture, in pixels."""
    return TITLE_HEIGHT + num_panels * PANEL_HEIGHT + GAP


def draw_windows(
    signals: Tensor, panels: Panels, predicted: Sequence[str], confidence: Tensor, true: Sequence[str]
) -> np.ndarray:
    """Draws each window's panels below its predicted class, as (height, WIDTH, 3) uint8.

    signals: (n, C, T); each panel has the same scale for all windows. predicted, true: class names, one per window.
    confidence: (n,), probability of each predicted class.
    """
    curves = [signals.double().cpu()[:, list(channels)] for channels in panels.values()]
    scaled = [lines / lines.abs().max().clamp(min=1e-12) for lines in curves]
    height = block_height(len(panels))
    bottom = -(-len(signals) // COLUMNS) * height + GAP
    image = Image.new("RGB", (WIDTH, bottom + SMALL + GAP), WHITE)
    draw = ImageDraw.Draw(image)
    for i in range(len(signals)):
        x, y = GAP + i % COLUMNS * (PANEL_WIDTH + GAP), i // COLUMNS * height
        _draw_verdict(draw, (x, y), predicted[i], float(confidence[i]), true[i])
        for j, lines in enumerate(scaled):
            _draw_panel(draw, (x, y + TITLE_HEIGHT + j * PANEL_HEIGHT), lines[i])
    _draw_legend(draw, (GAP, bottom + SMALL / 2), list(panels))
    return np.asarray(image)


def _draw_verdict(
    draw: ImageDraw.ImageDraw, corner: tuple[float, float], predicted: str, confidence: float, true: str
) -> None:
    """Draws a prediction as two lines of text. corner: their upper left corner."""
    x, y = corner
    is_right = predicted == true
    draw.text((x, y), drawable(predicted), BLUE if is_right else VERMILION, font(MEDIUM))
    verdict = f"{confidence:.0%}, right" if is_right else f"{confidence:.0%}, is {drawable(true)}"
    draw.text((x, y + MEDIUM + 1), verdict, GREY if is_right else VERMILION, font(SMALL))


def _draw_panel(draw: ImageDraw.ImageDraw, corner: tuple[float, float], lines: Tensor) -> None:
    """Draws the curves of one panel. lines: (3, T) or (1, T), in [-1, 1]. corner: upper left corner."""
    x, y = corner
    middle, reach = y + PANEL_HEIGHT / 2, PANEL_HEIGHT / 2 - 1
    draw.rectangle((x, y, x + PANEL_WIDTH, y + PANEL_HEIGHT), WHITE, PALE)
    draw.line((x, middle, x + PANEL_WIDTH, middle), PALE)
    across = np.linspace(x, x + PANEL_WIDTH, lines.shape[1]).tolist()
    for line, colour in zip(lines, AXIS_COLOURS, strict=False):
        points = list(zip(across, (middle - reach * line).tolist(), strict=True))
        draw.line(points, colour)


def _draw_legend(draw: ImageDraw.ImageDraw, left: tuple[float, float], panels: Sequence[str]) -> None:
    """Draws a one-line legend of colours and panels. left: middle of the legend's left edge."""
    x, y = left
    for name, colour in zip(AXES, AXIS_COLOURS, strict=True):
        draw.line((x, y, x + 2 * GAP, y), colour, 2)
        draw.text((x + 3 * GAP, y), name, BLACK, font(SMALL), anchor="lm")
        x += 5 * GAP + font(SMALL).getlength(name)
    draw.text((x, y), "from top: " + drawable(", ".join(panels)), GREY, font(SMALL), anchor="lm")
