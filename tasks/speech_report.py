"""What was heard beside what was said: error rates over a whole set, and its worst utterances.

Words are what spaces separate; among the characters is one space between words. Repeated spaces and those at the ends
count nowhere.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from models.speech.edit_distance import EditCounts, align, count_edits


def error_rates(said: Sequence[str], heard: Sequence[str]) -> dict[str, float]:
    """Of words ("wer") and characters ("cer"): all edits / all that was said, so it may exceed 1.

    "string_error_rate" is the share of utterances with any error. said, heard: the transcripts, in the same order.
    """
    words, characters = _edits(tuple(said), tuple(heard))
    return {
        "wer": float(words.edits.sum() / max(1, sum(len(text.split()) for text in said))),
        "cer": float(characters.edits.sum() / max(1, sum(len(_tidied(text)) for text in said))),
        "string_error_rate": float((characters.edits > 0).mean()) if len(said) else 0.0,
    }


def error_counts(said: Sequence[str], heard: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many words and characters were substituted, deleted and inserted; plain values, by unit."""
    counted = zip(("words", "characters"), _edits(tuple(said), tuple(heard)), strict=True)
    return {
        unit: {kind: int(count.sum()) for kind, count in zip(edits._fields, edits, strict=True)}
        for unit, edits in counted
    }


def worst_utterances(said: Sequence[str], heard: Sequence[str], count: int = 10) -> list[dict[str, Any]]:
    """Those with the most wrong words, then characters, then the first; none without an error. Plain values.

    "index" is the place in `said`. In "aligned" the words of both stand below each other, stars where one is missing.
    """
    words, characters = _edits(tuple(said), tuple(heard))
    order = np.lexsort([-characters.edits, -words.edits])[:count].tolist()
    return [
        {
            "index": i,
            "said": _tidied(said[i]),
            "heard": _tidied(heard[i]),
            "word_edits": int(words.edits[i]),
            "character_edits": int(characters.edits[i]),
            "aligned": _aligned(said[i], heard[i]),
        }
        for i in order
        if characters.edits[i] > 0
    ]


@lru_cache(maxsize=1)
def _edits(said: tuple[str, ...], heard: tuple[str, ...]) -> tuple[EditCounts, EditCounts]:
    """Of words, and of characters; kept, since rates, counts and the worst utterances are asked for one by one."""
    of_words = count_edits([text.split() for text in said], [text.split() for text in heard])
    return of_words, count_edits([_tidied(text) for text in said], [_tidied(text) for text in heard])


def _tidied(text: str) -> str:
    return " ".join(text.split())


def _aligned(said: str, heard: str) -> list[str]:
    """Two lines, their words in columns."""
    columns = [[str(edit.reference or ""), str(edit.hypothesis or "")] for edit in align(said.split(), heard.split())]
    widths = [max(map(len, column)) for column in columns]
    return [
        " ".join((column[row] or "*" * width).ljust(width) for column, width in zip(columns, widths, strict=True))
        for row in (0, 1)
    ]
