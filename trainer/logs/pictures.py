"""Pictures of an evaluation for TensorBoard: asked of the task, drawn, encoded as PNG.

They are drawn with Pillow, which every installation has, because TensorBoard itself depends on it.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

from trainer.loading.order import SampleKeys
from trainer.loop.precision import of_dtype
from trainer.loop.run import Run
from trainer.task import ConfusionMatrix, Picture, Sums

NUM_EXAMPLES = 6

Colour = tuple[int, int, int]
WHITE, BLACK, GREY, PALE = (255, 255, 255), (0, 0, 0), (110, 110, 110), (205, 205, 205)
BLUE = (0, 114, 178)

# In pixels. TensorBoard stretches or shrinks a picture to this width, without smoothing, so that small print stays
# legible at this width only.
WIDTH = 350
CELL, WIDEST_MATRIX = 39, 1200
LARGE, MEDIUM, SMALL = 15, 13, 11
GAP = 4


def log_pictures(run: Run, split: str, sums: Sums) -> None:
    """Logs what the task has to show of an evaluation that just ended. All processes call it; the main one draws."""
    run.parallel.on_main(lambda: run.log.pictures(run.progress.step, _pictures(run, split, sums)))


def _pictures(run: Run, split: str, sums: Sums) -> dict[str, Summary.Image]:
    pictures = {**run.task.pictures(sums), **_example_pictures(run, split)}
    return {f"{split}/{name}": encode(picture) for name, picture in pictures.items()}


@torch.no_grad()
def _example_pictures(run: Run, split: str) -> Mapping[str, Picture]:
    """Those of a few samples, spread evenly over the data set."""
    last = len(run.task.splits()[split]) - 1
    keys = SampleKeys(np.unique(np.linspace(0, last, NUM_EXAMPLES).astype(np.int64)), epoch=0)
    device = run.parallel.device
    examples = next(iter(run.loaders[split]([keys])))
    batch = of_dtype({name: tensor.to(device) for name, tensor in examples.items()}, run.precision.dtype)
    with run.average.applied(), _training_undisturbed(run), run.precision.autocast(device.type):
        return run.task.example_pictures(run.objective, batch)


@contextmanager
def _training_undisturbed(run: Run) -> Iterator[None]:
    """Eval mode within it; mode and random state are what they were after it."""
    was_training = run.objective.training
    run.objective.eval()
    gpus = [run.parallel.device] if run.parallel.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        run.objective.train(was_training)


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
    num_classes = len(counts)
    has_text = num_classes * CELL <= WIDEST_MATRIX
    labels = [_label(name.replace("_", "\n")) for name in picture.classes] if has_text else []
    left = top = max((label.width for label in labels), default=0) + MEDIUM + 3 * GAP
    side = num_classes * CELL if has_text else WIDEST_MATRIX
    image = Image.new("RGB", (max(left + side + GAP, WIDTH), top + side + GAP), WHITE)
    image.paste(_shades(shares).resize((side, side), Image.Resampling.BOX), (left, top))
    draw = ImageDraw.Draw(image)
    draw.rectangle((left, top, left + side, top + side), None, PALE)
    draw.text((left + side / 2, GAP / 2), "predicted", GREY, _font(MEDIUM), anchor="ma")
    _paste_turned(image, _label("true", GREY), centre=(GAP + MEDIUM / 2, top + side / 2))
    for i, label in enumerate(labels):
        middle = i * CELL + CELL / 2
        image.paste(label, (left - GAP // 2 - label.width, int(top + middle - label.height / 2)))
        _paste_turned(image, label, centre=(left + middle, top - GAP // 2 - label.width / 2))
        for j in range(num_classes):
            _draw_cell(draw, (left + j * CELL, top + i * CELL), int(counts[i, j]), shares[i, j])
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


def _label(text: str, ink: Colour = BLACK) -> Image.Image:
    """A small picture of a text of one or more lines, flush right."""
    lines = text.split("\n")
    font = _font(MEDIUM)
    image = Image.new("RGB", (int(max(map(font.getlength, lines))) + 2, (MEDIUM + 2) * len(lines) + 4), WHITE)
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        draw.text((image.width - 1, i * (MEDIUM + 2)), line, ink, font, anchor="ra")
    return image


def _paste_turned(image: Image.Image, label: Image.Image, centre: tuple[float, float]) -> None:
    """Puts a label on the picture so that it reads from bottom to top."""
    turned = label.transpose(Image.Transpose.ROTATE_90)
    image.paste(turned, (int(centre[0] - turned.width / 2), int(centre[1] - turned.height / 2)))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
