"""Pictures for TensorBoard: drawn, encoded as PNG.

They are drawn with Pillow, which every installation has, because TensorBoard itself depends on it.
"""

import io
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

from trainer.task import ConfusionMatrix, Picture

WHITE, BLACK, GREY, PALE = (255, 255, 255), (0, 0, 0), (110, 110, 110), (205, 205, 205)
BLUE = (0, 114, 178)

# In pixels. TensorBoard stretches or shrinks a picture to this width, without smoothing, so that small print stays
# legible at this width only.
WIDTH = 350
CELL, WIDEST_MATRIX = 39, 1200
LARGE, MEDIUM, SMALL = 15, 13, 11
GAP = 4


def encode(picture: Picture) -> Summary.Image:
    """A picture as TensorBoard keeps it. Raises TypeError for an array of another shape or type."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise TypeError(f"a picture must be (height, width, 3) uint8, not {picture.shape} {picture.dtype}")
        image = Image.fromarray(picture)
    else:
        # A palette halves the bytes and the time to write them.
        image = draw_confusion_matrix(picture).quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=3)
    return Summary.Image(width=image.width, height=image.height, colorspace=3, encoded_image_string=png.getvalue())


# --- confusion matrix --------------------------------------------------------------------------------------------


def draw_confusion_matrix(picture: ConfusionMatrix) -> Image.Image:
    """True classes in rows, predicted ones in columns; the shade of a cell is its share of the row.

    Each cell that is not empty says its count and its share in percent, unless there are too many classes for text.
    """
    counts = picture.counts.double().cpu().numpy()
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    has_text = len(counts) * CELL <= WIDEST_MATRIX
    names = [name.replace("_", "\n") for name in picture.classes] if has_text else []
    side = len(counts) * CELL if has_text else WIDEST_MATRIX
    font = _font(MEDIUM)
    longest = max((font.getlength(line) for name in names for line in name.split("\n")), default=0)
    left = top = int(longest) + MEDIUM + 3 * GAP
    width, height = max(left + side + GAP, WIDTH), top + side + GAP
    # What reads from bottom to top is written first, while the picture lies on its side.
    image = Image.new("RGB", (height, width), WHITE)
    draw = ImageDraw.Draw(image)
    draw.text((height - top - side / 2, GAP / 2), "true", GREY, font, anchor="ma")
    for i, name in enumerate(names):
        draw.text((height - top + GAP, left + (i + 0.5) * CELL), name, BLACK, font, anchor="lm")
    image = image.transpose(Image.Transpose.ROTATE_90)
    draw = ImageDraw.Draw(image)
    draw.text((left + side / 2, GAP / 2), "predicted", GREY, font, anchor="ma")
    for i, name in enumerate(names):
        draw.text((left - GAP, top + (i + 0.5) * CELL), name, BLACK, font, anchor="rm", align="right")
    image.paste(_shades(shares).resize((side, side), Image.Resampling.BOX), (left, top))
    draw.rectangle((left, top, left + side, top + side), None, PALE)
    for row, column in np.ndindex(counts.shape) if has_text else ():
        corner = left + column * CELL, top + row * CELL
        _draw_cell(draw, corner, int(counts[row, column]), shares[row, column])
    return image


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
        draw.text((x + CELL / 2, y + CELL * 0.34), f"{count}", ink, _font(LARGE), anchor="mm")
        draw.text((x + CELL / 2, y + CELL * 0.75), f"{share:.0%}", ink, _font(SMALL), anchor="mm")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
