"""Tests pictures of bars and confusion matrices: lengths, shades, numbers, and names of any kind."""

import numpy as np
import pytest
import torch

from tasks.pictures import BLUE, CELL, GAP, ROW, WIDTH, draw_bars, draw_confusion_matrix, drawable

URL = "http://rdf.freebase.com/ns/music.recording."


def lengths(picture):
    """Returns the length of the bar in each row, in pixels, and checks that each bar is one solid block."""
    is_bar = (picture == np.array(BLUE)).all(axis=-1)
    rows = [is_bar[top : top + ROW] for top in range(0, len(picture) - ROW + 1, ROW)]
    for row in rows:
        assert row.sum() == row.any(axis=0).sum() * row.any(axis=1).sum()
    return [int(row.any(axis=0).sum()) for row in rows]


def test_bar_lengths_equal_shares():
    longest, half, tenth, none = lengths(draw_bars(["a", "bc", "d", "e"], [0.4, 0.2, 0.04, 0.0]))
    assert longest > WIDTH / 2
    assert (half, tenth, none) == (pytest.approx(longest / 2, abs=1), pytest.approx(longest / 10, abs=1), 0)


@pytest.mark.parametrize("shares", [[0.0], [1.0], [0.0, 0.0], [1e-9, 1.0], [0.05] * 20])
@pytest.mark.parametrize("name", ["r", "interact^-1", URL + "featured_artists^-1", "W" * 80], ids=len)
def test_everything_fits_into_the_picture(name, shares):
    picture = draw_bars([name] * len(shares), shares)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[1:] == (WIDTH, 3)
    assert len(picture) - len(draw_bars(["r"], [1.0])) == (len(shares) - 1) * ROW
    assert (picture[:, [0, -1]] == 255).all() and (picture[[0, -1]] == 255).all()
    assert [length > 0 for length in lengths(picture)] == [share > 1e-3 for share in shares]
    assert max(lengths(picture)) > WIDTH / 4 or max(shares) == 0


def test_long_names_show_their_ends():
    pictures = [draw_bars([URL + name], [0.5]) for name in ("producer", "engineer", "producer^-1")]
    assert not (pictures[0] == pictures[1]).all() and not (pictures[0] == pictures[2]).all()
    assert (draw_bars([URL + URL + URL + "artist"], [0.5]) == draw_bars([URL + URL + "artist"], [0.5])).all()


def cells(counts, classes):
    """Returns the drawn cells of a confusion matrix, [row][column], as pixels without their borders."""
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
    assert abs(darkness[0][1] - darkness[1][2]) < 3  # both are about a tenth of their class
    assert max(darkness[0][2], darkness[2][2]) <= 2  # an empty cell, and a class that does not occur


def test_names_with_letters_missing_in_the_font_stay_distinguishable():
    assert drawable("Übung_běh 走") == "Ubung_beh \\u8d70"
    first, second = (draw_confusion_matrix(torch.ones(1, 1), [name]) for name in ("走", "跑"))
    assert first.shape != second.shape or (first != second).any()


def test_a_confusion_matrix_writes_its_counts():
    one, other = (cells([[900, count], [0, 50]], ["a", "b"]) for count in (7, 8))  # both about 1 %
    assert np.ptp(one[0][1], axis=(0, 1)).max() > 100  # there is text, and it changes with the count
    assert np.abs(one[0][1] - other[0][1]).max() > 100
    assert np.ptp(one[1][0]) == 0  # an empty cell has no text
    assert (one[1][1] == other[1][1]).all()


@pytest.mark.parametrize("num_classes", [1, 2, 30, 31, 2000])
def test_a_confusion_matrix_of_any_number_of_classes_can_be_drawn(num_classes):
    names = [f"class_{i}" for i in range(num_classes)]
    image = draw_confusion_matrix(torch.eye(num_classes), names)
    assert image.shape[0] <= image.shape[1] < 1400
    assert (image == BLUE).all(axis=-1).any()
