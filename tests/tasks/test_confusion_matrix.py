"""A confusion matrix as a picture: its shades, its numbers, and any number of classes."""

import numpy as np
import pytest
import torch

from tasks.confusion_matrix import CELL, draw_confusion_matrix
from tasks.drawing import BLUE, GAP, drawable


def cells(counts, classes):
    """The drawn cells of a confusion matrix, [row][column]: pixels without their borders."""
    image = draw_confusion_matrix(torch.tensor(counts), classes)
    assert image.dtype == np.uint8
    image = image.astype(int)
    start = image.shape[0] - GAP - CELL * len(classes), image.shape[0] - GAP - CELL * len(classes)
    corners = [[(start[0] + i * CELL, start[1] + j * CELL) for j in range(len(classes))] for i in range(len(classes))]
    return [[image[y + 2 : y + CELL - 1, x + 2 : x + CELL - 1] for y, x in row] for row in corners]


def test_a_confusion_matrix_shades_the_share_of_each_true_class():
    drawn = cells([[9, 1, 0], [30, 60, 10], [0, 0, 0]], ["a", "long_name", "c"])
    darkness = [[255 - int(cell[0, 0].mean()) for cell in row] for row in drawn]
    assert darkness[0][0] > darkness[1][1] > darkness[1][0] > darkness[1][2] > 5
    assert abs(darkness[0][1] - darkness[1][2]) < 3  # both a tenth of their class, whatever the counts
    assert max(darkness[0][2], darkness[2][2]) <= 2  # nothing there, and a class that does not occur


def test_names_that_the_font_lacks_letters_for_stay_apart():
    assert drawable("Übung_běh 走") == "Ubung_beh \\u8d70"
    first, second = (draw_confusion_matrix(torch.ones(1, 1), [name]) for name in ("走", "跑"))
    assert first.shape != second.shape or (first != second).any()


def test_a_confusion_matrix_writes_its_counts():
    one, other = (cells([[900, count], [0, 50]], ["a", "b"]) for count in (7, 8))  # 1% both
    assert np.ptp(one[0][1], axis=(0, 1)).max() > 100  # there is text, and it changes with the count
    assert np.abs(one[0][1] - other[0][1]).max() > 100
    assert np.ptp(one[1][0]) == 0  # an empty cell is left empty
    assert (one[1][1] == other[1][1]).all()


@pytest.mark.parametrize("num_classes", [1, 2, 30, 31, 2000])
def test_a_confusion_matrix_of_any_number_of_classes_can_be_drawn(num_classes):
    names = [f"class_{i}" for i in range(num_classes)]
    image = draw_confusion_matrix(torch.eye(num_classes), names)
    assert image.shape[0] <= image.shape[1] < 1400
    assert (image == BLUE).all(axis=-1).any()
