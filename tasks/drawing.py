"""What the pictures have in common: colours, sizes, and letters.

They are drawn with Pillow, which every installation has, because TensorBoard depends on it. No meaning hangs on telling
red from green.
"""

import unicodedata
from functools import cache

from PIL import ImageFont

WHITE, BLACK, GREY, PALE = (255, 255, 255), (0, 0, 0), (110, 110, 110), (205, 205, 205)
# Okabe and Ito, "Color universal design", 2008: told apart by people with any kind of colour vision.
BLUE, VERMILION, GREEN = (0, 114, 178), (213, 94, 0), (0, 158, 115)

# In pixels. TensorBoard stretches or shrinks a picture to this width, without smoothing, so that small print stays
# legible at this width only.
WIDTH = 350
LARGE, MEDIUM, SMALL = 15, 13, 11
GAP = 4


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """size: in pixels."""
    return ImageFont.load_default(size)


def drawable(text: str) -> str:
    """In the letters that the font has: without accents, and others by their numbers, which tell them apart."""
    letters = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return (letters or text).encode("ascii", "backslashreplace").decode()
