"""Tests scores against slow forms of their definitions, over pairs, rows and classes one at a time."""

import math

import numpy as np
import pytest

from data.tabular.scores import accuracy, auc, brier, ece, log_loss, scores


def predicted(num_classes: int, num_levels: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels, (90,), and probabilities, (90, num_classes), with many ties if num_levels is small."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, num_levels, (90, num_classes)).astype(float)
    labels = rng.integers(0, num_classes, 90)
    weights[np.arange(90), labels] += rng.integers(0, 3, 90)
    return labels, weights / weights.sum(1, keepdims=True)


CASES = [predicted(num_classes, num_levels, seed) for seed, (num_classes, num_levels) in enumerate(
    [(2, 3), (2, 1000), (3, 3), (4, 1000), (10, 5)]
)]  # fmt: skip


def slow_area(is_positive: np.ndarray, probability: np.ndarray) -> float:
    """Returns the probability that a positive scores above a negative; ties count half."""
    pairs = [(p, n) for p in probability[is_positive] for n in probability[~is_positive]]
    return sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)


def slow_ece(labels: np.ndarray, probabilities: np.ndarray) -> float:
    total = 0.0
    for i in range(15):
        rows = [r for r in range(len(labels)) if i / 15 < max(probabilities[r]) <= (i + 1) / 15]
        if rows:
            right = sum(np.argmax(probabilities[r]) == labels[r] for r in rows) / len(rows)
            confident = sum(max(probabilities[r]) for r in rows) / len(rows)
            total += len(rows) / len(labels) * abs(right - confident)
    return total


@pytest.mark.parametrize(("labels", "probabilities"), CASES)
def test_scores_equal_their_definitions(labels, probabilities) -> None:
    num_classes = probabilities.shape[1]
    rows = list(zip(labels, probabilities, strict=True))
    areas = [slow_area(labels == c, probabilities[:, c]) for c in range(num_classes)]
    squares = [sum((p - (c == label)) ** 2 for c, p in enumerate(row)) for label, row in rows]
    expected = {
        "accuracy": sum(list(row).index(max(row)) == label for label, row in rows) / len(rows),
        "auc": areas[1] if num_classes == 2 else sum(areas) / num_classes,
        "log_loss": -sum(math.log(row[label]) for label, row in rows) / len(rows),
        "brier": sum(squares) / len(rows),
        "ece": slow_ece(labels, probabilities),
    }
    assert scores(labels, probabilities) == pytest.approx(expected, abs=1e-12)


def test_the_auc_of_ties_equals_values_by_hand() -> None:
    """sklearn.metrics.roc_auc_score returned the expected values."""
    labels = np.array([0, 1, 0, 1])
    for probability, expected in [([0.1, 0.2, 0.3, 0.4], 0.75), ([0.5] * 4, 0.5), ([0.1, 0.5, 0.5, 0.5], 0.75)]:
        assert auc(labels, np.stack([1 - np.array(probability), probability], axis=1)) == expected


def test_the_auc_ignores_classes_without_rows() -> None:
    labels, probabilities = CASES[2]
    wider = np.pad(probabilities, ((0, 0), (0, 2)))
    assert auc(labels, wider) == auc(labels, probabilities)
    with np.errstate(all="raise"):
        assert math.isnan(auc(np.zeros(3, int), np.full((3, 2), 0.5)))
        assert math.isnan(auc(np.zeros(3, int), np.full((3, 3), 1 / 3)))


def test_best_and_worst_predictions_have_extreme_scores() -> None:
    labels = np.array([0, 1, 2])
    best, worst = np.eye(3), np.eye(3)[[1, 2, 0]]
    assert scores(labels, best) == {"accuracy": 1, "auc": 1, "log_loss": 0, "brier": 0, "ece": 0}
    assert (accuracy(labels, worst), auc(labels, worst), brier(labels, worst), ece(labels, worst)) == (0, 0.25, 2, 1)
    assert log_loss(labels, worst) == pytest.approx(-math.log(2**-52))


def test_float32_probabilities_are_summed_in_float64() -> None:
    labels, probabilities = CASES[3]
    low = probabilities.astype(np.float32)
    assert scores(labels, low) == scores(labels, low.astype(np.float64))
