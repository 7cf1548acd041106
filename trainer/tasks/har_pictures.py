"""A picture of windows, each under what it was taken for.

Drawn with Pillow, which every installation has, because TensorBoard depends on it. No meaning hangs on telling red from
green.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from trainer.tasks.confusion_matrix import BLACK, BLUE, GAP, GREY, MEDIUM, PALE, SMALL, WHITE, WIDTH, font

PANELS, AXES = ("acceleration", "rotation", "with gravity"), ("x", "y", "z")

# Okabe and Ito, "Color universal design", 2008: told apart by people with any kind of colour vision.
VERMILION, GREEN = (213, 94, 0), (0, 158, 115)
AXIS_COLOURS = (BLUE, VERMILION, GREEN)

# In pixels.
COLUMNS, PANEL_HEIGHT = 2, 28
PANEL_WIDTH = (WIDTH - GAP) // COLUMNS - GAP
TITLE_HEIGHT = MEDIUM + SMALL + GAP
BLOCK_HEIGHT = TITLE_HEIGHT + len(PANELS) * PANEL_HEIGHT + GAP


def draw_windows(signals: Tensor, predicted: Sequence[str], confidence: Tensor, true: Sequence[str]) -> np.ndarray:
    """One block for each window: its verdict, and its panels below each other. (height, WIDTH, 3) uint8.

    signals: (n, 9, T), the x, y and z of each panel; a panel has one scale in all windows. predicted, true: the class
    of each window. confidence: (n,) in [0, 1].
    """
    curves = signals.double().cpu().unflatten(1, (len(PANELS), len(AXES)))
    scales = curves.abs().amax(dim=(0, 2, 3)).clamp(min=1e-12)
    bottom = -(-len(curves) // COLUMNS) * BLOCK_HEIGHT + GAP
    image = Image.new("RGB", (WIDTH, bottom + SMALL + GAP), WHITE)
    draw = ImageDraw.Draw(image)
    for i, panels in enumerate(curves):
        x, y = GAP + i % COLUMNS * (PANEL_WIDTH + GAP), i // COLUMNS * BLOCK_HEIGHT
        _draw_verdict(draw, (x, y), predicted[i], float(confidence[i]), true[i])
        for j, lines in enumerate(panels):
            _draw_panel(draw, (x, y + TITLE_HEIGHT + j * PANEL_HEIGHT), lines / scales[j])
    _draw_legend(draw, (GAP, bottom + SMALL / 2))
    return np.asarray(image)


def _draw_verdict(
    draw: ImageDraw.ImageDraw, corner: tuple[float, float], predicted: str, confidence: float, true: str
) -> None:
    """Two lines of text, their upper left corner given; words say what the colours say."""
    x, y = corner
    is_right = predicted == true
    draw.text((x, y), predicted, BLUE if is_right else VERMILION, font(MEDIUM))
    verdict = f"{confidence:.0%}, right" if is_right else f"{confidence:.0%}, is {true}"
    draw.text((x, y + MEDIUM + 1), verdict, GREY if is_right else VERMILION, font(SMALL))


def _draw_panel(draw: ImageDraw.ImageDraw, corner: tuple[float, float], lines: Tensor) -> None:
    """lines: (3, T) in [-1, 1]."""
    x, y = corner
    middle, reach = y + PANEL_HEIGHT / 2, PANEL_HEIGHT / 2 - 1
    draw.rectangle((x, y, x + PANEL_WIDTH, y + PANEL_HEIGHT), WHITE, PALE)
    draw.line((x, middle, x + PANEL_WIDTH, middle), PALE)
    across = np.linspace(x, x + PANEL_WIDTH, lines.shape[1]).tolist()
    for line, colour in zip(lines, AXIS_COLOURS, strict=True):
        points = list(zip(across, (middle - reach * line).tolist(), strict=True))
        draw.line(points, colour)


def _draw_legend(draw: ImageDraw.ImageDraw, left: tuple[float, float]) -> None:
    """One line of text, the middle of its left end given."""
    x, y = left
    for name, colour in zip(AXES, AXIS_COLOURS, strict=True):
        draw.line((x, y, x + 2 * GAP, y), colour, 2)
        draw.text((x + 3 * GAP, y), name, BLACK, font(SMALL), anchor="lm")
        x += 5 * GAP + font(SMALL).getlength(name)
    draw.text((x, y), "from top: " + ", ".join(PANELS), GREY, font(SMALL), anchor="lm")
