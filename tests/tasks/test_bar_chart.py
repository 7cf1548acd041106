"""Bars are as long as their shares, and any names fit beside them."""

import numpy as np
import pytest

from tasks.bar_chart import ROW, draw_bars
from tasks.drawing import BLUE, WIDTH

URL = "http://rdf.freebase.com/ns/music.recording."


def lengths(picture):
    """Of the bar in each row, in pixels; a bar is one solid block."""
    is_bar = (picture == np.array(BLUE)).all(axis=-1)
    rows = [is_bar[top : top + ROW] for top in range(0, len(picture) - ROW + 1, ROW)]
    for row in rows:
        assert row.sum() == row.any(axis=0).sum() * row.any(axis=1).sum()
    return [int(row.any(axis=0).sum()) for row in rows]


def test_bars_are_as_long_as_their_shares():
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
