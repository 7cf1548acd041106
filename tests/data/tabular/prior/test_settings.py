import numpy as np
import pytest

from data.tabular.prior.settings import PriorSettings


def test_shapes_fill_their_ranges():
    settings = PriorSettings(rows=(40, 50), features=(2, 5), context_share=(0.3, 0.7))
    shapes = np.array([settings.shape(0, group) for group in range(2000)])
    rows = shapes[:, 0] + shapes[:, 1]
    assert set(rows) == set(range(40, 51)) and set(shapes[:, 2]) == {2, 3, 4, 5}
    share = shapes[:, 0] / rows
    assert share.min() < 0.32 and share.max() > 0.68 and share.min() > 0.28 and share.max() < 0.72
    assert [settings.shape(0, group) for group in range(9)] != [settings.shape(1, group) for group in range(9)]


def test_rows_are_uniform_in_the_logarithm():
    settings = PriorSettings(rows=(32, 1024))
    rows = np.array([sum(settings.shape(0, group)[:2]) for group in range(2000)])
    assert rows.min() >= 32 and rows.max() <= 1024 and abs(np.median(rows) - 181) < 20


def test_the_context_has_room_for_all_classes():
    settings = PriorSettings(rows=(32, 32), context_share=(0.05, 0.1))
    assert all(settings.shape(0, group)[0] == 10 for group in range(20))


@pytest.mark.parametrize(
    "wrong",
    [{"rows": (8, 8)}, {"rows": (64, 32)}, {"features": (0, 3)}, {"classes": 11}, {"context_share": (0.5, 1.0)}],
)
def test_impossible_settings_raise(wrong):
    with pytest.raises(AssertionError):
        PriorSettings(**wrong)
