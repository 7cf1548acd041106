"""Draws bar charts and confusion matrices with Pillow.

The meaning of a picture never depends on distinguishing red from green.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

WHITE, BLACK, GREY, PALE = (255, 255, 255), (0, 0, 0), (110, 110, 110), (205, 205, 205)
# Okabe and Ito, "Color universal design", 2008: colours that people with any colour vision can distinguish
BLUE, VERMILION, GREEN = (0, 114, 178), (213, 94, 0), (0, 158, 115)

# In pixels. TensorBoard scales pictures to this width without smoothing; other widths would make text illegible.
WIDTH = 350
LARGE, MEDIUM, SMALL = 15, 13, 11
GAP = 4
ROW = SMALL + 2 * GAP
"""Distance, in pixels, between the tops of consecutive bars."""
WIDEST_NAME = WIDTH // 2
CELL, WIDEST_MATRIX = 39, 1200


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns Pillow's default font. size: in pixels."""
    return ImageFont.load_default(size)


def drawable(text: str) -> str:
    """Replaces characters that the font lacks: drops accents, and escapes other non-ASCII characters."""
    letters = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return (letters or text).encode("ascii", "backslashreplace").decode()


def draw_bars(names: Sequence[str], shares: Sequence[float]) -> np.ndarray:
    """Draws a horizontal bar for each name, labelled with its share in percent, as (height, WIDTH, 3) uint8.

    names: only the end of a long name is drawn. shares: at least 0; the bar of the largest share fills the width.
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
    """Shortens a name that is wider than WIDEST_NAME pixels to "..." and as much of its end as fits."""
    parts = (name, *(f"...{name[start:]}" for start in range(len(name))))
    return next(part for part in parts if font(SMALL).getlength(part) <= WIDEST_NAME)


def draw_confusion_matrix(counts: Tensor, classes: Sequence[str]) -> np.ndarray:
    """Draws a confusion matrix, as (height, width, 3) uint8. The shade of a cell shows the cell's share of its row.

    If there are few classes, each non-empty cell also shows its count and percentage.

    counts: (C, C), indexed by [true class, predicted class]. classes: C names.
    """
    cells = counts.double().cpu().numpy()
    shares = cells / cells.sum(axis=1, keepdims=True).clip(min=1)
    has_text = len(cells) * CELL <= WIDEST_MATRIX
    names = [drawable(name).replace("_", "\n") for name in classes] if has_text else []
    side = len(cells) * CELL if has_text else WIDEST_MATRIX
    medium = font(MEDIUM)
    longest = max((medium.getlength(line) for name in names for line in name.split("\n")), default=0)
    left = top = int(longest) + MEDIUM + 3 * GAP
    width, height = max(left + side + GAP, WIDTH), top + side + GAP
    # vertical text is drawn horizontally, and then the picture is rotated
    image = Image.new("RGB", (height, width), WHITE)
    draw = ImageDraw.Draw(image)
    draw.text((height - top - side / 2, GAP / 2), "true", GREY, medium, anchor="ma")
    for i, name in enumerate(names):
        draw.text((height - top + GAP, left + (i + 0.5) * CELL), name, BLACK, medium, anchor="lm")
    image = image.transpose(Image.Transpose.ROTATE_90)
    draw = ImageDraw.Draw(image)
    draw.text((left + side / 2, GAP / 2), "predicted", GREY, medium, anchor="ma")
    for i, name in enumerate(names):
        draw.text((left - GAP, top + (i + 0.5) * CELL), name, BLACK, medium, anchor="rm", align="right")
    image.paste(_shades(shares).resize((side, side), Image.Resampling.BOX), (left, top))
    draw.rectangle((left, top, left + side, top + side), None, PALE)
    for row, column in np.ndindex(cells.shape) if has_text else ():
        corner = left + column * CELL, top + row * CELL
        _draw_cell(draw, corner, int(cells[row, column]), shares[row, column])
    return np.asarray(image)


def _shades(shares: np.ndarray) -> Image.Image:
    """Maps shares (C, C) in [0, 1] to C x C pixels from white to blue.

    The shade is proportional to the square root of the share, which makes rare mistakes visible.
    """
    white, blue = np.array(WHITE), np.array(BLUE)
    return Image.fromarray((white + (blue - white) * np.sqrt(shares)[..., None]).round().astype(np.uint8))


def _draw_cell(draw: ImageDraw.ImageDraw, corner: tuple[float, float], count: int, share: float) -> None:
    x, y = corner
    draw.rectangle((x, y, x + CELL, y + CELL), None, PALE)
    if count > 0:
        ink = WHITE if share > 0.5 else BLACK
        draw.text((x + CELL / 2, y + CELL * 0.34), f"{count}", ink, font(LARGE), anchor="mm")
        draw.text((x + CELL / 2, y + CELL * 0.75), f"{share:.0%}", ink, font(SMALL), anchor="mm")
