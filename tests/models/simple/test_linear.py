"""Tests linear classifiers against the minimum of their loss, and on what a line can and cannot separate."""

import numpy as np
import pytest

from models.simple.linear import logistic_regression, ridge_classifier, window_statistics


@pytest.fixture
def blobs():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    centres = np.array([[0, 0, 3], [4, 0, 0], [0, 5, 0]])
    features = centres[labels] + rng.normal(size=(300, 3))
    return features * [1, 100, 0.01] + [5, 0, 0], labels


@pytest.mark.parametrize("fit", [ridge_classifier, logistic_regression])
def test_linear_models_separate_in_any_unit_and_with_gaps(fit, blobs):
    features, labels = blobs
    classify = fit(features[:200], labels[:200], 3)
    assert (classify(features[200:]).argmax(1) == labels[200:]).mean() > 0.9
    gaps = np.column_stack([features, np.full(300, np.nan), np.ones(300)])
    gaps[::7, 0] = np.nan
    found = fit(gaps[:200], labels[:200], 3)(gaps[200:])
    assert np.isfinite(found).all() and (found.argmax(1) == labels[200:]).mean() > 0.8


def test_probabilities_minimise_the_penalised_loss(blobs):
    features, labels = blobs
    p = logistic_regression(features, labels, 2)(features)
    np.testing.assert_allclose(p.sum(1), 1)
    x = np.column_stack([np.ones(300), (features - features.mean(0)) / features.std(0)])
    is_one = labels == 1
    weights = np.zeros(4)
    for _ in range(20_000):  # gradient descent
        q = 1 / (1 + np.exp(-x @ weights))
        weights -= 2e-3 * (x.T @ (q - is_one) + np.r_[1e-6, 1, 1, 1] * weights)
    both = [1 / (1 + np.exp(-x @ weights))]
    others = labels == 0
    weights = np.zeros(4)
    for _ in range(20_000):
        q = 1 / (1 + np.exp(-x @ weights))
        weights -= 2e-3 * (x.T @ (q - others) + np.r_[1e-6, 1, 1, 1] * weights)
    both.append(1 / (1 + np.exp(-x @ weights)))
    np.testing.assert_allclose(p[:, 1], both[0] / (both[0] + both[1]), atol=1e-6)


def test_statistics_are_computed_per_channel():
    t = np.arange(64) / 64
    signals = np.stack([np.stack([np.sin(2 * np.pi * 3 * t), 2 + 0 * t])] * 5000).astype(np.float32)
    found = window_statistics(signals)
    assert found.shape == (5000, 2 * (6 + 8)) and np.ptp(found, axis=0).max() == 0
    np.testing.assert_allclose(found[0, :8], [0, 2, 0.5**0.5, 0, -1, 2, 1, 2], atol=2e-2)
    assert found[0, 12:20].argmax() == 2  # three periods
