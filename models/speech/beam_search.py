"""Prefix beam search for CTC (Hannun et al., 2014, algorithm 1), which decodes a batch of utterances on the CPU.

Beam search of width 1 differs from greedy decoding: it compares prefixes by the total probability of their alignments,
while greedy decoding compares the symbols of each frame.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np

from models.speech.ctc import BLANK
from models.speech.language_model import Scorer


class Hypothesis(NamedTuple):
    """Transcript with its log score, which is its log-probability plus the scores of the language model."""

    ids: tuple[int, ...]
    log_score: float


def beam_search(
    log_probs: np.ndarray,
    lengths: np.ndarray,
    width: int,
    *,
    scorer: Scorer | None = None,
    symbols_per_frame: int | None = None,
) -> list[list[Hypothesis]]:
    """Returns 1 to `width` transcripts per utterance, best first.

    If the width is at least the number of possible prefixes, probabilities are exact sums over all alignments.

    log_probs: (B, T, V); symbol 0 is the blank. lengths: (B,), number of frames of each utterance; frames of padding
    are ignored. width: number of prefixes kept per frame. symbols_per_frame: how many of a frame's most probable
    symbols may extend prefixes (default: all).
    """
    order = np.argsort(-lengths, kind="stable")  # longest first
    frames = log_probs[order].astype(np.float64)
    frames[np.isnan(frames)] = -np.inf  # NaN comes from a diverged model
    num_symbols = frames.shape[2] - 1
    num_tried = min(symbols_per_frame or num_symbols, num_symbols)
    beam = _Beam.start(len(frames), width, 0 if scorer is None else scorer.begin())
    sources, appended = np.zeros((2, frames.shape[1], len(frames), width), np.int64)
    sources[:] = np.arange(width)
    for t in range(lengths.max(initial=0)):
        num_active = int((lengths > t).sum())
        frame = frames[:num_active, t]
        tried = np.argpartition(-frame[:, 1:], num_tried - 1, axis=1)[:, :num_tried] + 1
        after, sources[t, :num_active], appended[t, :num_active] = _step(
            beam.take(slice(num_active)), frame, tried, scorer
        )
        beam.put(after)
    score = beam.score + (0 if scorer is None else scorer.end(beam.state))
    return [hypotheses for _, hypotheses in sorted(zip(order, _backtrack(score, sources, appended), strict=True))]


@dataclass
class _Beam:
    """Prefixes kept for each utterance; all arrays are (B, W), and unused elements have probability 0."""

    blank: np.ndarray
    """Log of the total probability of the prefix's alignments that end with a blank."""
    symbol: np.ndarray
    """Log of the total probability of the prefix's alignments that end with its last symbol."""
    last: np.ndarray
    """Last symbol of the prefix; 0 for the empty prefix."""
    key: np.ndarray
    """Hash of the prefix, uint64."""
    parent_key: np.ndarray
    """Hash of the prefix without its last symbol."""
    state: np.ndarray
    """State of the scorer after the prefix."""
    bonus: np.ndarray
    """Sum of the language model's scores for the prefix."""

    @classmethod
    def start(cls, batch_size: int, width: int, state: int) -> Self:
        shape = batch_size, width
        blank, symbol = np.full((2, *shape), -np.inf)
        blank[:, 0] = 0
        last, states = np.zeros(shape, np.int64), np.full(shape, state)
        return cls(blank, symbol, last, np.ones(shape, np.uint64), np.zeros(shape, np.uint64), states, np.zeros(shape))

    def take(self, places: Any) -> "_Beam":
        return _Beam(*(getattr(self, field.name)[places] for field in fields(self)))

    def put(self, others: "_Beam") -> None:
        """Replaces the prefixes of the first utterances with the prefixes of `others`, perhaps of fewer utterances."""
        for field in fields(self):
            values = getattr(others, field.name)
            getattr(self, field.name)[: len(values)] = values

    @property
    def log_prob(self) -> np.ndarray:
        return np.logaddexp(self.blank, self.symbol)

    @property
    def score(self) -> np.ndarray:
        return self.log_prob + self.bonus


def _step(
    beam: _Beam, log_probs: np.ndarray, tried: np.ndarray, scorer: Scorer | None
) -> tuple[_Beam, np.ndarray, np.ndarray]:
    """Processes one frame. log_probs: (B, V). tried: (B, K), symbols to append.

    Returns the new beam and two arrays, (B, W) each: the position in the old beam from which each prefix comes, and the
    symbol appended to the prefix there, or 0 if none was appended.
    """
    (batch_size, width), num_tried = beam.last.shape, tried.shape[1]
    every = np.arange(batch_size)[:, None]
    parent = _parents(beam)
    stays = _stay(beam, parent, log_probs)
    appends = _append(beam, parent, log_probs, tried)  # (B, W, K)
    added = beam.bonus[:, :, None]
    if scorer is not None:
        added = added + scorer.scores(beam.state)[every[:, :, None], np.arange(width)[:, None], tried[:, None]]
    added = np.broadcast_to(added, appends.shape)

    scores = np.concatenate([stays.score, (appends + added).reshape(batch_size, -1)], 1)
    best = np.argpartition(-scores, width - 1, axis=1)[:, :width]
    is_new = best >= width
    source, which = np.divmod(np.where(is_new, best - width, best * num_tried), num_tried)
    after = stays.take((every, source))
    new = is_new.nonzero()[0], source[is_new], which[is_new]
    symbol = tried[new[0], new[2]]
    after.blank[is_new], after.symbol[is_new], after.bonus[is_new] = -np.inf, appends[new], added[new]
    after.parent_key[is_new], after.last[is_new] = after.key[is_new], symbol
    after.key[is_new] = _extended(after.key[is_new], symbol)
    if scorer is not None:
        after.state[is_new] = scorer.advance(after.state[is_new], symbol)
    appended = np.zeros_like(source)
    appended[is_new] = symbol
    return after, source, appended


def _parents(beam: _Beam) -> np.ndarray:
    """Returns each prefix's parent (the prefix without its last symbol) as a beam position, (B, W), or -1 if absent."""
    used = beam.log_prob > -np.inf
    is_parent = beam.parent_key[:, :, None] == beam.key[:, None, :]  # (B, W prefixes, W parents)
    is_parent &= used[:, :, None] & used[:, None, :]
    return np.where(is_parent.any(2), is_parent.argmax(2), -1)


def _stay(beam: _Beam, parent: np.ndarray, log_probs: np.ndarray) -> _Beam:
    """Updates the probabilities of the prefixes in the beam for one frame.

    The frame can be a blank, repeat a prefix's last symbol, or extend the prefix's parent to the prefix.
    """
    every = np.arange(len(parent))[:, None]
    emitted = log_probs[every, beam.last]
    before = np.where(beam.last[every, parent] == beam.last, beam.blank[every, parent], beam.log_prob[every, parent])
    from_parent = np.where(parent >= 0, before + emitted, -np.inf)
    return replace(
        beam, blank=beam.log_prob + log_probs[:, :1], symbol=np.logaddexp(beam.symbol + emitted, from_parent)
    )


def _append(beam: _Beam, parent: np.ndarray, log_probs: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Returns log-probabilities (B, W, K) of extended prefixes, or -inf if the extended prefix is already in the beam.

    An alignment needs a blank between two equal symbols.
    """
    is_repeat = tried[:, None, :] == beam.last[:, :, None]
    before = np.where(is_repeat, beam.blank[:, :, None], beam.log_prob[:, :, None])
    is_there = np.zeros((*parent.shape, log_probs.shape[1]), bool)
    row, child = (parent >= 0).nonzero()
    is_there[row, parent[row, child], beam.last[row, child]] = True
    is_there = np.take_along_axis(is_there, np.broadcast_to(tried[:, None, :], is_repeat.shape), 2)
    return np.where(is_there, -np.inf, before + np.take_along_axis(log_probs, tried, 1)[:, None, :])


def _extended(keys: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    """Returns hashes of extended prefixes, computed by SplitMix64's mixing function (Steele et al., 2014)."""
    keys = (keys ^ symbols.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _backtrack(score: np.ndarray, sources: np.ndarray, appended: np.ndarray) -> list[list[Hypothesis]]:
    """Follows prefixes backwards through all frames, and returns each utterance's transcripts, best first.

    score: (B, W). sources, appended: (T, B, W), results of `_step` for each frame.
    """
    every = np.arange(len(score))[:, None]
    place = np.argsort(-score, axis=1, kind="stable")
    symbols = np.empty((*score.shape, len(sources)), np.int64)
    ranked = np.take_along_axis(score, place, 1)
    for t in reversed(range(len(sources))):
        symbols[:, :, t] = appended[t, every, place]
        place = sources[t, every, place]
    return [
        [
            Hypothesis(tuple(ids[ids != BLANK].tolist()), float(log_score))
            for i, (ids, log_score) in enumerate(zip(*pair, strict=True))
            if i == 0 or log_score > -np.inf
        ]
        for pair in zip(symbols, ranked, strict=True)
    ]
