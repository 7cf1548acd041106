"""Tests the most probable alignment of a text against all alignments."""

from itertools import groupby, product

import numpy as np
import pytest

from models.speech.alignment import align


def random_log_probs(num_frames, num_symbols, seed):
    logits = np.random.default_rng(seed).normal(size=(num_frames, num_symbols))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def best_path(log_probs, ids):
    """Returns the best path by trying all of them."""
    num_frames, num_symbols = log_probs.shape
    paths = [
        path
        for path in product(range(num_symbols), repeat=num_frames)
        if [symbol for symbol, _ in groupby(path) if symbol != 0] == list(ids)
    ]
    return max(paths, key=lambda path: sum(log_probs[t, symbol] for t, symbol in enumerate(path)))


@pytest.mark.parametrize("ids", [(), (1,), (2, 1), (1, 1), (2, 2, 1), (1, 2, 1, 2)])
@pytest.mark.parametrize("num_frames", [5, 6])
@pytest.mark.parametrize("seed", range(3))
def test_the_most_probable_alignment_is_found(ids, num_frames, seed):
    log_probs = random_log_probs(num_frames, 3, seed)
    found = align(log_probs, np.array(ids, np.int64))
    runs, t = [], 0
    for symbol, frames in groupby(best_path(log_probs, ids)):
        length = len(list(frames))
        if symbol != 0:
            runs.append((t, t + length, np.exp(log_probs[t : t + length, symbol]).max()))
        t += length
    assert [(a, b) for a, b, _ in runs] == list(zip(found.starts, found.ends, strict=True))
    assert np.allclose([confidence for _, _, confidence in runs], found.confidence, rtol=1e-12)


def test_too_few_frames_are_refused():
    with pytest.raises(ValueError, match="2 frames are too few for 2 symbols"):
        align(random_log_probs(2, 3, 0), np.array([1, 1]))


def test_long_transcripts_lie_at_the_time_of_their_sound():
    ids = np.tile([1, 2], 150)
    log_probs = np.full((600, 3), np.log(0.05))
    log_probs[np.arange(600), np.stack([np.zeros(300, np.int64), ids], axis=1).ravel()] = np.log(0.9)
    found = align(log_probs, ids)
    assert found.starts.tolist() == list(range(1, 600, 2)) and found.ends.tolist() == list(range(2, 601, 2))
