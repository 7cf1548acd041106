"""A picture of named shares as bars.

Drawn with Pillow, which every installation has, because TensorBoard depends on it.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from trainer.tasks.confusion_matrix import BLACK, BLUE, GAP, GREY, SMALL, WHITE, WIDTH, font

ROW = SMALL + 2 * GAP
BAR = WIDTH // 3
"""Pixels of the longest bar."""


def draw_bars(names: Sequence[str], shares: Sequence[float]) -> np.ndarray:
    """One bar for each name, from the top, with its share in percent.

    shares: at least 0; the largest one fills the width. Returns (height, width, 3) uint8.
    """
    small = font(SMALL)
    left = max(small.getlength(name) for name in names) + 2 * GAP
    width = int(max(WIDTH, left + BAR + 5 * SMALL))
    image = Image.new("RGB", (width, len(names) * ROW + GAP), WHITE)
    draw = ImageDraw.Draw(image)
    longest = max(*shares, 1e-12)
    for i, (name, share) in enumerate(zip(names, shares, strict=True)):
        top, middle = i * ROW + GAP, (i + 0.5) * ROW + GAP / 2
        right = left + share / longest * BAR
        draw.text((left - GAP, middle), name, BLACK, small, anchor="rm")
        draw.rectangle((left, top, right, top + SMALL), BLUE)
        draw.text((right + GAP, middle), f"{share:.1%}", GREY, small, anchor="lm")
    return np.asarray(image)
