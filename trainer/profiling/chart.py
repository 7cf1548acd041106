"""The picture of how speed grows with devices."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 480, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 28, 44
WHITE, BLACK, GREY, PALE = (255, 255, 255), (0, 0, 0), (110, 110, 110), (225, 225, 225)
COLOURS = {"ddp": (0, 114, 178), "dp": (213, 94, 0)}


def draw_scaling(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Speed-up over the number of devices, with the line of perfect scaling; (HEIGHT, WIDTH, 3) uint8.

    rows: with `mode` ("single", "dp" or "ddp"), `num_devices` and `speedup`; the first one is the single device.
    """
    most = max(2.0, *(float(row["num_devices"]) for row in rows), *(float(row["speedup"]) for row in rows))
    image = Image.new("RGB", (WIDTH, HEIGHT), WHITE)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(12)

    def at(devices: float, speedup: float) -> tuple[float, float]:
        across, up = devices / most, speedup / most
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    for number in sorted({int(row["num_devices"]) for row in rows}):
        draw.line((*at(number, 0), *at(number, most)), PALE)
        draw.line((*at(0, number), *at(most, number)), PALE)
        draw.text((at(number, 0)[0], HEIGHT - BOTTOM + 6), str(number), BLACK, font, anchor="ma")
        draw.text((LEFT - 6, at(0, number)[1]), str(number), BLACK, font, anchor="rm")
    draw.line((*at(0, 0), *at(most, most)), GREY)
    draw.text((WIDTH / 2, HEIGHT - 18), "devices", GREY, font, anchor="ma")
    draw.text((LEFT, 6), "speed-up over one device; grey: perfect", GREY, font)
    for i, (mode, colour) in enumerate(COLOURS.items()):
        points = [(row["num_devices"], row["speedup"]) for row in rows if row["mode"] in ("single", mode)]
        if len(points) < 2:
            continue
        places = [at(*point) for point in points]
        draw.line(places, colour, 2)
        for x, y in places:
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), colour)
        draw.text((WIDTH - RIGHT - 4, HEIGHT - BOTTOM - 18 * (i + 1)), mode, colour, font, anchor="ra")
    return np.asarray(image)
