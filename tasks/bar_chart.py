"""A picture of named shares as bars."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from tasks.drawing import BLACK, BLUE, GAP, GREY, SMALL, WHITE, WIDTH, drawable, font

ROW = SMALL + 2 * GAP
"""Pixels from one bar to the next."""
WIDEST_NAME = WIDTH // 2


def draw_bars(names: Sequence[str], shares: Sequence[float]) -> np.ndarray:
    """One bar for each name, from the top, with its share in percent.

    names: of those wider than half the picture the end is shown, which tells a URL or a path from its neighbours.
    shares: at least 0; the bar of the largest one is as long as fits. Returns (height, WIDTH, 3) uint8.
    """
    small = font(SMALL)
    names = [_shortened(drawable(name)) for name in names]
    left = round(max(small.getlength(name) for name in names)) + 2 * GAP
    space = WIDTH - left - small.getlength("100.0%") - 2 * GAP
    longest = max(*shares, 1e-12)
    image = Image.new("RGB", (WIDTH, len(names) * ROW + GAP), WHITE)
    draw = ImageDraw.Draw(image)
    for i, (name, share) in enumerate(zip(names, shares, strict=True)):
        top, middle = i * ROW + GAP, i * ROW + GAP + SMALL / 2
        length = round(share / longest * space)
        draw.text((left - GAP, middle), name, BLACK, small, anchor="rm")
        if length > 0:
            draw.rectangle((left, top, left + length - 1, top + SMALL), BLUE)
        draw.text((left + length + GAP, middle), f"{share:.1%}", GREY, small, anchor="lm")
    return np.asarray(image)


def _shortened(name: str) -> str:
    """Its end, as much as fits into WIDEST_NAME."""
    parts = (name, *(f"...{name[start:]}" for start in range(len(name))))
    return next(part for part in parts if font(SMALL).getlength(part) <= WIDEST_NAME)
