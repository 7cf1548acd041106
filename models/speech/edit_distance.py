"""Edit distance (Levenshtein, 1966) between sequences of hashable values: counts for many pairs, or an alignment.

Among alignments with the fewest edits, the functions choose one with the most substitutions.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np

_CHUNK = 256
"""Number of sequence pairs of similar lengths to compare at a time."""


class EditCounts(NamedTuple):
    """Numbers of edits that turn the reference of each pair into its hypothesis, (n,) int64 each."""

    substitutions: np.ndarray
    deletions: np.ndarray
    insertions: np.ndarray

    @property
    def edits(self) -> np.ndarray:
        """Returns the edit distance, (n,) int64."""
        return self.substitutions + self.deletions + self.insertions


class Edit(NamedTuple):
    """Step of an alignment. `hypothesis` is None for a deletion, and `reference` is None for an insertion."""

    kind: Literal["equal", "substitution", "deletion", "insertion"]
    reference: Hashable
    hypothesis: Hashable


def count_edits(references: Sequence[Sequence[Hashable]], hypotheses: Sequence[Sequence[Hashable]]) -> EditCounts:
    """Counts the edits between each reference and the hypothesis with the same index."""
    numbers: dict[Hashable, int] = {}
    pairs = [
        tuple([numbers.setdefault(value, len(numbers)) for value in side] for side in pair)
        for pair in zip(references, hypotheses, strict=True)
    ]
    order = sorted(range(len(pairs)), key=lambda i: [len(side) for side in pairs[i]])
    counts = np.zeros((3, len(pairs)), np.int64)
    for first in range(0, len(order), _CHUNK):
        chunk = order[first : first + _CHUNK]
        counts[:, chunk] = _count_edits([pairs[i][0] for i in chunk], [pairs[i][1] for i in chunk])
    return EditCounts(*counts)


def _count_edits(references: list[list[int]], hypotheses: list[list[int]]) -> np.ndarray:
    """Returns the numbers of substitutions, deletions and insertions of all pairs: (3, n).

    If `without` is the cost of alignments that do not end in an insertion, the cost of all alignments is cost[j] =
    min_{k <= j} without[k] + (j - k) * gap.
    """
    reference, num_reference = _padded(references, -1)
    hypothesis, num_hypothesis = _padded(hypotheses, -2)
    substitution, gap = _costs(reference.shape[1], hypothesis.shape[1])
    of_insertions = np.arange(hypothesis.shape[1] + 1) * gap
    cost = np.repeat(of_insertions[None], len(reference), 0)
    every = np.arange(len(reference))
    total = cost[every, num_hypothesis]
    for i in range(reference.shape[1]):
        without = cost + gap
        diagonal = cost[:, :-1] + substitution * (reference[:, i : i + 1] != hypothesis)
        np.minimum(without[:, 1:], diagonal, out=without[:, 1:])
        cost = np.minimum.accumulate(without - of_insertions, axis=1) + of_insertions
        total = np.where(num_reference == i + 1, cost[every, num_hypothesis], total)
    edits, gaps = np.divmod(total, substitution)
    deletions = (gaps + num_reference - num_hypothesis) // 2
    return np.stack([edits - gaps, deletions, gaps - deletions])


def align(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> list[Edit]:
    """Returns an alignment with as many edits of each type as `count_edits` counts."""
    substitution, gap = _costs(len(reference), len(hypothesis))
    cost = [[j * gap for j in range(len(hypothesis) + 1)]]
    for i, value in enumerate(reference):
        row = [cost[i][0] + gap]
        for j, other in enumerate(hypothesis):
            row.append(min(cost[i][j] + substitution * (value != other), cost[i][j + 1] + gap, row[j] + gap))
        cost.append(row)
    edits = []
    i, j = len(reference), len(hypothesis)
    while i > 0 or j > 0:
        here = cost[i][j]
        if i > 0 and j > 0 and here == cost[i - 1][j - 1] + substitution * (reference[i - 1] != hypothesis[j - 1]):
            i, j = i - 1, j - 1
            kind: Literal["equal", "substitution"] = "equal" if reference[i] == hypothesis[j] else "substitution"
            edits.append(Edit(kind, reference[i], hypothesis[j]))
        elif i > 0 and here == cost[i - 1][j] + gap:
            i -= 1
            edits.append(Edit("deletion", reference[i], None))
        else:
            j -= 1
            edits.append(Edit("insertion", None, hypothesis[j]))
    return edits[::-1]


def _costs(num_reference: int, num_hypothesis: int) -> tuple[int, int]:
    """Returns the cost n of a substitution, and n + 1 of a deletion or insertion; n is 1 + the sum of the lengths.

    An alignment has fewer than n deletions and insertions. Dividing its total cost by n therefore gives the number of
    edits, and the remainder is the total number of deletions and insertions.
    """
    one_edit = num_reference + num_hypothesis + 1
    return one_edit, one_edit + 1


def _padded(rows: list[list[int]], value: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows at the end with `value`; returns the padded rows, (n, longest), and their lengths, (n,) int64."""
    lengths = np.array([len(row) for row in rows])
    table = np.full((len(rows), lengths.max()), value)
    table[np.arange(lengths.max()) < lengths[:, None]] = [number for row in rows for number in row]
    return table, lengths
