"""Scores of predicted class probabilities.

labels are (n,) int64 with n >= 1, probabilities (n, C) with rows that add up to 1.
"""

import numpy as np

_LEAST_PROBABILITY = float(np.finfo(np.float64).eps)
_NUM_BINS = 15


def scores(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    """Returns all scores: {"accuracy", "auc", "log_loss", "brier", "ece"}."""
    of_each = (accuracy, auc, log_loss, brier, ece)
    return {score.__name__: score(labels, probabilities) for score in of_each}


def accuracy(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the share of rows whose class has the highest probability; the first of equal ones counts."""
    return float((probabilities.argmax(axis=1) == labels).mean())


def auc(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the area under the ROC curve, ties counting half; for more than two classes the mean of one-versus-rest.

    Classes of no row or every row are skipped; NaN if none remain.
    """
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    areas = [_area(labels == c, probabilities[:, c]) for c in classes if 0 < (labels == c).sum() < len(labels)]
    return float(np.mean(areas)) if areas else float("nan")


def _area(is_positive: np.ndarray, probability: np.ndarray) -> float:
    """Returns Mann and Whitney's U / (positives * negatives), from mean ranks of ties."""
    ascending = np.sort(probability)
    first, last = (np.searchsorted(ascending, probability[is_positive], side) for side in ("left", "right"))
    num_positives = len(first)
    rank_sum = (first + last + 1).sum() / 2
    return float((rank_sum - num_positives * (num_positives + 1) / 2) / (num_positives * (~is_positive).sum()))


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the mean of -log of the class's probability, in nats, clipped at 2.2e-16."""
    of_class = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    return float(-np.log(np.maximum(of_class, _LEAST_PROBABILITY)).mean())


def brier(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the mean squared distance to the true class's unit vector, 0 to 2 (Brier, 1950)."""
    error = probabilities.astype(np.float64)
    error[np.arange(len(labels)), labels] -= 1
    return float((error**2).sum(axis=1).mean())


def ece(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the expected calibration error (Guo et al., ICML 2017, eq. 5) over 15 equal intervals (a, b].

    The mean over rows of the distance between accuracy and highest probability in a row's interval.
    """
    confidence = probabilities.max(axis=1).astype(np.float64)
    is_right = probabilities.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * _NUM_BINS).astype(np.int64) - 1, 0, _NUM_BINS - 1)
    return float(np.abs(np.bincount(bins, is_right - confidence)).sum() / len(labels))
