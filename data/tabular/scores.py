"""Scores of predicted class probabilities.

All functions take int64 labels of shape (n,), n >= 1, and probabilities of shape (n, C), with rows that sum to 1.
"""

import numpy as np

_LEAST_PROBABILITY = float(np.finfo(np.float64).eps)
_NUM_BINS = 15


def scores(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    """Returns all scores by name: accuracy, auc, log_loss, brier and ece."""
    of_each = (accuracy, auc, log_loss, brier, ece)
    return {score.__name__: score(labels, probabilities) for score in of_each}


def accuracy(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the share of rows whose class has the highest probability; in a tie, the first class counts."""
    return float((probabilities.argmax(axis=1) == labels).mean())


def auc(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the area under the ROC curve, where ties count half.

    For more than two classes, the area is the mean of the one-versus-rest areas. A class that no row has, or that
    every row has, is skipped. The result is NaN if no class remains.
    """
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    areas = [_area(labels == c, probabilities[:, c]) for c in classes if 0 < (labels == c).sum() < len(labels)]
    return float(np.mean(areas)) if areas else float("nan")


def _area(is_positive: np.ndarray, probability: np.ndarray) -> float:
    """Returns the Mann-Whitney statistic U / (positives * negatives), where tied values get their mean rank."""
    ascending = np.sort(probability)
    first, last = (np.searchsorted(ascending, probability[is_positive], side) for side in ("left", "right"))
    num_positives = len(first)
    rank_sum = (first + last + 1).sum() / 2
    return float((rank_sum - num_positives * (num_positives + 1) / 2) / (num_positives * (~is_positive).sum()))


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the mean of -log(probability of the true class), in nats; probabilities below 2.2e-16 are clipped."""
    of_class = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    return float(-np.log(np.maximum(of_class, _LEAST_PROBABILITY)).mean())


def brier(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the mean squared distance between probabilities and the one-hot label, from 0 to 2 (Brier, 1950)."""
    error = probabilities.astype(np.float64)
    error[np.arange(len(labels)), labels] -= 1
    return float((error**2).sum(axis=1).mean())


def ece(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the expected calibration error (Guo et al., ICML 2017, eq. 5) over 15 equal intervals (a, b].

    A row belongs to the interval of its highest probability. The error of an interval is the distance between the
    accuracy and the mean highest probability of its rows. Intervals are weighted by their number of rows.
    """
    confidence = probabilities.max(axis=1).astype(np.float64)
    is_right = probabilities.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * _NUM_BINS).astype(np.int64) - 1, 0, _NUM_BINS - 1)
    return float(np.abs(np.bincount(bins, is_right - confidence)).sum() / len(labels))
