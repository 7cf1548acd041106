"""A picture of how often which class was taken for which, for the tasks that come with the trainer and for others."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from tasks.drawing import BLACK, BLUE, GAP, GREY, LARGE, MEDIUM, PALE, SMALL, WHITE, WIDTH, drawable, font

# In pixels.
CELL, WIDEST_MATRIX = 39, 1200


def draw_confusion_matrix(counts: Tensor, classes: Sequence[str]) -> np.ndarray:
    """True classes in rows, predicted ones in columns; the shade of a cell is its share of the row.

    Each cell that is not empty says its count and its share in percent, unless there are too many classes for text.

    counts: (C, C), rows are the true classes, columns the predicted ones. classes: their C names. Returns
    (height, width, 3) uint8.
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
    # What reads from bottom to top is written first, while the picture lies on its side.
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
    """(C, C) in [0, 1] -> C x C pixels from white to blue: lightness alone tells the shares apart.

    Their root, so that rare mistakes show too.
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
