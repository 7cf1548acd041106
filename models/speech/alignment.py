"""Alignment of symbols with frames of speech, by the most probable CTC alignment (Viterbi, 1967)."""

from typing import NamedTuple

import numpy as np

from models.speech.ctc import BLANK


class Aligned(NamedTuple):
    """Frames and confidence of each symbol in a text, (U,) each."""

    starts: np.ndarray
    """First frame of the symbol, int64."""
    ends: np.ndarray
    """Frame after the last frame of the symbol, int64."""
    confidence: np.ndarray
    """Highest probability of the symbol in its frames, in [0, 1]."""


def align(log_probs: np.ndarray, ids: np.ndarray) -> Aligned:
    """Aligns a sequence of symbols with frames by the most probable CTC alignment.

    log_probs: (T, V); symbol 0 is the blank. ids: (U,) integers in [1, V). Raises ValueError if the symbols need more
    than T frames (`ctc.shortest_alignment`).
    """
    states = np.full(2 * len(ids) + 1, BLANK)  # blank, first symbol, blank, ..., last symbol, blank
    states[1::2] = ids
    may_skip = np.zeros(len(states), bool)
    may_skip[2:] = (states[2:] != BLANK) & (states[2:] != states[:-2])
    score = np.where(np.arange(len(states)) < 2, log_probs[0, states], -np.inf)
    steps = np.zeros((len(log_probs), len(states)), np.int8)  # distance to the state of the previous frame
    for t in range(1, len(log_probs)):
        from_one = np.concatenate([[-np.inf], score[:-1]])
        from_two = np.where(may_skip, np.concatenate([[-np.inf, -np.inf], score])[: len(states)], -np.inf)
        ways = np.stack([score, from_one, from_two])
        steps[t] = ways.argmax(0)
        score = ways.max(0) + log_probs[t, states]
    state = len(states) - 1 - int(len(states) > 1 and score[-2] > score[-1])
    if score[state] == -np.inf:
        raise ValueError(f"{len(log_probs)} frames are too few for {len(ids)} symbols")
    path = np.empty(len(log_probs), np.int64)
    for t in reversed(range(len(log_probs))):
        path[t] = state
        state -= int(steps[t, state])
    said = 2 * np.arange(len(ids)) + 1
    starts, ends = np.searchsorted(path, said), np.searchsorted(path, said, side="right")
    highest = [log_probs[a:b, symbol].max() for a, b, symbol in zip(starts, ends, ids, strict=True)]
    return Aligned(starts, ends, np.exp(highest))
