"""N-gram language models from ARPA files, used as scorers of `beam_search` (shallow fusion).

The score of a transcript y of audio x is log p(y | x) + weight * log p_lm(y) + bonus * units(y) (Hannun et al., 2014).
units(y) is the number of symbols, or the number of words if the language model predicts words.
"""

import gzip
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.common.files import lines_of, require_regular

START, END, UNKNOWN = "<s>", "</s>", "<unk>"
SPACE_NAMES = ("<space>", "|", "\N{LOWER ONE EIGHTH BLOCK}")
"""Names of the space symbol in ARPA files of character models."""

_NEVER = -100.0
"""Minimum log10-probability, also used for unknown words if a file has no `<unk>` entry, as in KenLM."""


@dataclass(frozen=True)
class NGram:
    """Probabilities of words given preceding words, with backoff weights (Katz, 1987).

    entries: maps a tuple of words to (log10-probability of the last word given the words before it, log10 backoff
    weight of the tuple).
    """

    order: int
    entries: dict[tuple[str, ...], tuple[float, float]]

    def score(self, history: Sequence[str], word: str) -> float:
        """Returns the natural log-probability of a word. history: all words before the word, starting with `START`."""
        words = tuple(w if (w,) in self.entries else UNKNOWN for w in (*self.context(history), word))
        backoff = 0.0
        for first in range(len(words)):
            if words[first:] in self.entries:
                return (backoff + self.entries[words[first:]][0]) * math.log(10)
            backoff += self.entries.get(words[first:-1], (0.0, 0.0))[1]
        return (backoff + _NEVER) * math.log(10)

    def context(self, history: Sequence[str]) -> tuple[str, ...]:
        """Returns the last order - 1 words of the history, on which the probability of the next word depends."""
        return tuple(history[max(0, len(history) - self.order + 1) :])

    @property
    def vocabulary(self) -> set[str]:
        """Returns all words except the special words for start, end and unknown words."""
        return {words[0] for words in self.entries if len(words) == 1} - {START, END, UNKNOWN}


def read_arpa(path: Path) -> NGram:
    """Reads a UTF-8 ARPA file of any order, which is gzip-compressed if its name ends in .gz.

    Raises OSError if the file cannot be read, and ValueError if its content is invalid.
    """
    counts: dict[int, int] = {}
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    order = -1  # order of the section; 0 in \data\; -1 before \data\, where any text is allowed
    for number, line in _lines(path):
        place = f"line {number}"
        section = re.fullmatch(r"\\(\d+)-grams:", line)
        if line == "\\data\\":
            order = 0
        elif order == -1:
            continue
        elif line == "\\end\\":
            _check_counts(entries, counts, place)
            return NGram(max(counts, default=0), entries)
        elif section is not None:
            order = int(section[1])
        elif order == 0:
            announced = re.fullmatch(r"ngram\s+(\d+)\s*=\s*(\d+)", line)
            if announced is None:
                raise ValueError(f"{place}: {line!r} does not have the form ngram ORDER=COUNT")
            counts[int(announced[1])] = int(announced[2])
        else:
            _add_entry(entries, line, order, place)
    missing = "\\data\\" if order == -1 else "\\end\\"
    raise ValueError(f"the line {missing} is missing, so the file is truncated or not an ARPA file")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number and text of each non-empty line."""
    require_regular(path)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(lines_of(file), 1):
                if line.strip():
                    yield number, line.strip()
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"is damaged, or is not text in UTF-8 ({error})") from None


def _add_entry(entries: dict[tuple[str, ...], tuple[float, float]], line: str, order: int, place: str) -> None:
    probability, *words = re.split(r"[ \t]+", line)
    backoff = words.pop() if len(words) == order + 1 else "0"
    if len(words) != order:
        raise ValueError(
            f"{place}: {line!r} must be a log10 probability, {order} words and optionally a backoff weight"
        )
    try:
        values = max(float(probability), _NEVER), max(float(backoff), _NEVER)
    except ValueError:
        values = math.nan, math.nan
    if not (values[0] <= 0 and values[1] < math.inf):
        raise ValueError(
            f"{place}: {probability} is not a log10 probability, or {backoff} is not a log10 backoff weight"
        )
    if tuple(words) in entries:
        raise ValueError(f"{place}: {' '.join(words)!r} occurs twice")
    entries[tuple(words)] = values


def _check_counts(entries: dict[tuple[str, ...], tuple[float, float]], counts: dict[int, int], place: str) -> None:
    found = Counter(map(len, entries))
    for order in sorted(counts.keys() | found.keys()):
        if found[order] != counts.get(order, 0):
            announced = f"but its section \\data\\ announces {counts.get(order, 0)}"
            raise ValueError(f"{place}: the file has {found[order]} entries of order {order}, {announced}")


class Scorer(ABC):
    """Base class of language models whose scores are added to the log-probabilities of prefixes.

    A state is the index of a context (the last words or symbols) in a table of cached scores.
    """

    def __init__(self, num_symbols: int) -> None:
        self._table = np.zeros((64, num_symbols))
        self._contexts: list[tuple] = []
        self._states: dict[tuple, int] = {}
        self._after: dict[tuple[int, int], int] = {}

    @abstractmethod
    def first_context(self) -> tuple:
        """Returns the context at the start of an utterance."""

    @abstractmethod
    def row(self, context: tuple) -> np.ndarray:
        """Returns the score of appending each symbol to a context, (V,)."""

    @abstractmethod
    def next_context(self, context: tuple, symbol: int) -> tuple: ...

    @abstractmethod
    def end_of(self, context: tuple) -> float: ...

    def begin(self) -> int:
        """Returns the initial state for new utterances, and invalidates the states of previous utterances."""
        self._contexts.clear()
        self._states.clear()
        self._after.clear()
        return self._state(self.first_context())

    def scores(self, states: np.ndarray) -> np.ndarray:
        """Returns the score of appending each symbol, (..., V) float64. states: (...) int64."""
        return self._table[states]

    def advance(self, states: np.ndarray, symbols: np.ndarray) -> np.ndarray:
        """Returns the states after appending one symbol to each state. states, symbols: (n,); symbols in [1, V)."""
        pairs = zip(states.tolist(), symbols.tolist(), strict=True)
        return np.array([self._after[pair] if pair in self._after else self._step(*pair) for pair in pairs], np.int64)

    def end(self, states: np.ndarray) -> np.ndarray:
        """Returns the scores of ending the utterance in the given states, (...) float64."""
        used, where = np.unique(states, return_inverse=True)
        return np.array([self.end_of(self._contexts[state]) for state in used])[where].reshape(states.shape)

    def _step(self, state: int, symbol: int) -> int:
        after = self._after[state, symbol] = self._state(self.next_context(self._contexts[state], symbol))
        return after

    def _state(self, context: tuple) -> int:
        state = self._states.setdefault(context, len(self._contexts))
        if state == len(self._contexts):
            self._contexts.append(context)
            if state == len(self._table):
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._table[state] = self.row(context)
        return state


class SymbolScorer(Scorer):
    """Scores a symbol by the bonus, plus the symbol's weighted log-probability if an n-gram model is given.

    symbols: (V,), names of the symbols, blank first. The n-gram model may use any of `SPACE_NAMES` for the space.
    """

    def __init__(self, ngram: NGram | None, symbols: Sequence[str], weight: float, bonus: float) -> None:
        super().__init__(len(symbols))
        self.ngram, self.weight, self.bonus = ngram, weight, bonus
        known = set() if ngram is None else ngram.vocabulary
        space = next((name for name in SPACE_NAMES if name in known), " ")
        self.symbols = [space if symbol == " " else symbol for symbol in symbols]

    def first_context(self) -> tuple[str, ...]:
        return () if self.ngram is None else self.ngram.context([START])

    def row(self, context: tuple[str, ...]) -> np.ndarray:
        if self.ngram is None:
            return np.full(len(self.symbols), self.bonus)
        scores = [self.ngram.score(context, symbol) for symbol in self.symbols]
        return self.weight * np.array(scores) + self.bonus

    def next_context(self, context: tuple[str, ...], symbol: int) -> tuple[str, ...]:
        return () if self.ngram is None else self.ngram.context((*context, self.symbols[symbol]))

    def end_of(self, context: tuple[str, ...]) -> float:
        return 0.0 if self.ngram is None else self.weight * _end_score(self.ngram, context)


class WordScorer(Scorer):
    """Scores each word at the space after the word or at the end of the utterance. Repeated spaces score 0.

    symbols: (V,), blank first, including a space.
    """

    def __init__(self, ngram: NGram, symbols: Sequence[str], weight: float, bonus: float) -> None:
        super().__init__(len(symbols))
        self.ngram, self.symbols, self.weight, self.bonus = ngram, symbols, weight, bonus
        self.space = symbols.index(" ")

    def first_context(self) -> tuple[tuple[str, ...], str]:
        return self.ngram.context([START]), ""

    def row(self, context: tuple[tuple[str, ...], str]) -> np.ndarray:
        scores = np.zeros(len(self.symbols))
        scores[self.space] = self._word_score(*context)
        return scores

    def next_context(self, context: tuple[tuple[str, ...], str], symbol: int) -> tuple[tuple[str, ...], str]:
        history, begun = context
        if symbol != self.space:
            return history, begun + self.symbols[symbol]
        return (self.ngram.context((*history, begun)) if begun else history), ""

    def end_of(self, context: tuple[tuple[str, ...], str]) -> float:
        history, begun = context
        words = (*history, begun) if begun else history
        return self._word_score(history, begun) + self.weight * _end_score(self.ngram, words)

    def _word_score(self, history: tuple[str, ...], word: str) -> float:
        return self.weight * self.ngram.score(history, word) + self.bonus if word else 0.0


def _end_score(ngram: NGram, history: Sequence[str]) -> float:
    """Returns the log-probability of the end of an utterance, or 0 if the model does not predict ends."""
    return ngram.score(history, END) if (END,) in ngram.entries else 0.0


def build_scorer(
    ngram: NGram | None, symbols: Sequence[str], weight: float = 1.0, bonus: float = 0.0
) -> SymbolScorer | WordScorer:
    """Builds a word scorer if the symbols include a space and the n-gram model predicts words of several letters.

    Otherwise builds a symbol scorer. symbols: (V,), blank first. Raises ValueError if the symbols cannot spell any word
    of the n-gram model.
    """
    if ngram is None:
        return SymbolScorer(None, symbols, weight, bonus)
    predicted = ngram.vocabulary - set(SPACE_NAMES)
    of_words = " " in symbols and any(len(word) > 1 for word in predicted)
    known = set(symbols)
    if not any(set(word) <= known if of_words else word in known for word in predicted):
        strange = min(predicted, default="nothing")
        raise ValueError(f"predicts words such as {strange!r}, which the lower-case alphabet cannot spell")
    return (WordScorer if of_words else SymbolScorer)(ngram, symbols, weight, bonus)
