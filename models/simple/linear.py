"""Linear classifiers that serve as baselines, fitted in closed form or by a few Newton steps."""

from collections.abc import Callable

import numpy as np

Classifier = Callable[[np.ndarray], np.ndarray]
"""Function that maps features (n, m) to class scores (n, num_classes)."""

_RIDGE_PENALTY, _LOGISTIC_PENALTY = 10.0, 1.0
"""L2 penalties on the weights of standardised features, for losses summed over rows."""
_NEWTON_STEPS = 10
_BANDS = 8
_WINDOWS = 4096
"""Number of windows processed at a time."""


def window_statistics(signals: np.ndarray) -> np.ndarray:
    """Computes summary statistics of each channel of windows: (N, C, T) -> (N, m) float64.

    The statistics are mean, standard deviation, minimum, maximum, median, mean absolute change between time steps, and
    the log energies of the 8 lowest nonzero frequencies.
    """
    found = []
    for start in range(0, len(signals), _WINDOWS):
        x = signals[start : start + _WINDOWS].astype(np.float64)
        changes = np.abs(np.diff(x, axis=2)).sum(2) / x.shape[2]
        parts = [x.mean(2), x.std(2), x.min(2), x.max(2), np.median(x, axis=2), changes]
        energies = np.abs(np.fft.rfft(x - x.mean(2, keepdims=True), axis=2)[:, :, 1 : 1 + _BANDS]) ** 2
        found.append(np.concatenate([*parts, np.log(energies + 1e-6).reshape(len(x), -1)], axis=1))
    return np.concatenate(found)


def ridge_classifier(features: np.ndarray, labels: np.ndarray, num_classes: int) -> Classifier:
    """Fits a ridge regression whose target is 1 for a row's class and -1 for each other class.

    features: (n, m). labels: (n,), class indices.
    """
    expand = _standardiser(features)
    x, targets = expand(features), 2.0 * (labels[:, None] == np.arange(num_classes)) - 1
    weights = np.linalg.solve(x.T @ x + _penalties(x, _RIDGE_PENALTY), x.T @ targets)
    return lambda rows: expand(rows) @ weights


def logistic_regression(features: np.ndarray, labels: np.ndarray, num_classes: int) -> Classifier:
    """Fits one-versus-rest logistic regressions by Newton's method, and normalises their probabilities."""
    expand = _standardiser(features)
    x = expand(features)
    penalties, weights = _penalties(x, _LOGISTIC_PENALTY), np.zeros((x.shape[1], num_classes))
    for of_class in range(num_classes):
        for _ in range(_NEWTON_STEPS):
            p = _sigmoid(x @ weights[:, of_class])
            gradient = x.T @ (p - (labels == of_class)) + penalties @ weights[:, of_class]
            curvature = (x * np.maximum(p * (1 - p), 1e-6)[:, None]).T @ x + penalties
            weights[:, of_class] -= np.linalg.solve(curvature, gradient)

    def classify(rows: np.ndarray) -> np.ndarray:
        p = np.maximum(_sigmoid(expand(rows) @ weights), 1e-12)
        return p / p.sum(1, keepdims=True)

    return classify


def _standardiser(features: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that standardises features, sets missing values to 0, and prepends a column of ones."""
    num_known = np.maximum((~np.isnan(features)).sum(0), 1)
    mean = np.nansum(features, axis=0, dtype=np.float64) / num_known
    std = np.sqrt(np.nansum((features - mean) ** 2, axis=0) / num_known)
    std[std == 0] = 1

    def expand(rows: np.ndarray) -> np.ndarray:
        return np.column_stack([np.ones(len(rows)), np.nan_to_num((rows - mean) / std)])

    return expand


def _penalties(x: np.ndarray, penalty: float) -> np.ndarray:
    """Returns a diagonal matrix of L2 penalties, with almost no penalty for the leading column of ones."""
    return np.diag(np.r_[1e-6, np.full(x.shape[1] - 1, penalty)])


def _sigmoid(margin: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(margin, -30, 30)))
