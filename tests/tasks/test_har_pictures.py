"""Tests the pictures of human activity recognition: what they show, and how windows are drawn."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from data.har.windows import CLASSES, SIGNALS
from tasks import har
from tasks.har import HarFlags, HarTask
from tasks.har_pictures import (
    AXIS_COLOURS,
    PANEL_HEIGHT,
    TITLE_HEIGHT,
    VERMILION,
    block_height,
    draw_windows,
    panels_of,
)
from tasks.pictures import BLUE, WIDTH, draw_confusion_matrix
from trainer.loading.order import SampleKeys


def drawn(signals: torch.Tensor, predicted, true) -> np.ndarray:
    picture = draw_windows(signals, panels_of(SIGNALS), predicted, torch.full((len(signals),), 0.75), true)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[1:] == (WIDTH, 3)
    return picture


def is_of_colour(area: np.ndarray, colour) -> np.ndarray:
    return (area == np.array(colour)).all(axis=-1)


def test_right_and_wrong_predictions_differ_in_colour():
    right, wrong = (drawn(torch.zeros(1, 9, 16), ["a"], [true])[:TITLE_HEIGHT] for true in "ab")
    assert is_of_colour(right, BLUE).any() and not is_of_colour(right, VERMILION).any()
    assert is_of_colour(wrong, VERMILION).any() and not is_of_colour(wrong, BLUE).any()


@pytest.mark.parametrize("panel", [0, 1, 2])
def test_all_windows_share_the_scale_of_a_panel(panel):
    """A weak signal is drawn flat beside a strong one, however strong other panels are."""
    wave = torch.sin(torch.arange(64.0)).expand(3, 64)
    signals = 100 * torch.randn(2, 3, 3, 64)
    signals[:, panel] = torch.stack([0.01 * wave, wave])
    picture = drawn(signals.flatten(1, 2), ["a", "a"], ["a", "a"])
    top = TITLE_HEIGHT + panel * PANEL_HEIGHT
    drawn_last = AXIS_COLOURS[2]
    rows_with_ink = [
        int(is_of_colour(picture[top : top + PANEL_HEIGHT, columns], drawn_last).any(axis=1).sum())
        for columns in (slice(0, 170), slice(180, 350))
    ]
    assert rows_with_ink[0] <= 3 < 20 < rows_with_ink[1]


@pytest.mark.parametrize(("num_windows", "length"), [(1, 2), (5, 10), (6, 128), (7, 128)])
def test_any_number_of_windows_can_be_drawn(num_windows, length):
    names = ["a"] * num_windows
    rows_of_blocks = -(-num_windows // 2)
    heights = [len(drawn(torch.randn(n, 9, length), names[:n], names[:n])) for n in (1, num_windows)]
    assert heights[1] - heights[0] == (rows_of_blocks - 1) * block_height(3)


def test_har_shows_its_confusion_recalls_and_windows(cache_dir, monkeypatch):
    task = HarTask(HarFlags(mode="first", hidden_dims=(8,)), seed=0, cache_dir=cache_dir)
    confusion = torch.zeros(6, 6, dtype=torch.float64)
    confusion[0, 0], confusion[0, 3], confusion[3, 3], confusion[4, 3] = 3, 1, 5, 2
    sums = {"loss": torch.tensor(1.0), "confusion": confusion, "weight": torch.tensor(11.0)}
    metrics = task.summarise(sums)
    recalls = {name: value for name, value in metrics.items() if name.startswith("recall/")}
    assert recalls == {"recall/WALKING": 0.75, "recall/SITTING": 1.0, "recall/STANDING": 0.0}
    assert not recalls.keys() & set(task.headline)

    drawing = Mock(wraps=draw_confusion_matrix)
    monkeypatch.setattr(har, "draw_confusion_matrix", drawing)
    assert task.pictures(sums)["confusion_matrix"].shape[2] == 3
    (counts, classes), _ = drawing.call_args
    assert torch.equal(counts, confusion) and tuple(classes) == CLASSES

    objective = task.build_objective().eval()
    task.initialise(objective)
    keys = SampleKeys(np.arange(4) * 50, epoch=0)
    batch = task.collate(task.splits()["val"].__getitems__(keys), keys)
    drawing = Mock(wraps=draw_windows)
    monkeypatch.setattr(har, "draw_windows", drawing)
    with torch.no_grad():
        pictures = task.example_pictures(objective, batch)
        shares = objective.model(batch["signals"]).softmax(1)
    (windows, panels), said = drawing.call_args
    assert pictures["windows"].shape[1:] == (WIDTH, 3)
    assert said["true"] == [CLASSES[i] for i in batch["label"].tolist()]
    assert said["predicted"] == [CLASSES[i] for i in shares.argmax(1).tolist()]
    assert torch.equal(said["confidence"], shares.amax(1))
    assert [*panels] == ["acceleration", "rotation", "with gravity"]
    signals, model = batch["signals"], objective.model
    expected = (signals[:, 7] - model.mean[7]) / model.std[7]  # total acceleration, y
    assert torch.equal(windows[:, 7], expected)
