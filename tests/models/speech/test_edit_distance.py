"""Tests edit counts against a recursion over all alignments, and alignments against their own claims."""

from functools import cache

import numpy as np
import pytest

from models.speech.edit_distance import align, count_edits


def slow_counts(reference, hypothesis):
    """Returns (substitutions, deletions, insertions) of the fewest edits, with the most substitutions among those."""

    @cache
    def best(i, j):
        if i == 0 or j == 0:
            return 0, i, j
        s, d, n = best(i - 1, j - 1)
        ways = [(s + (reference[i - 1] != hypothesis[j - 1]), d, n)]
        s, d, n = best(i - 1, j)
        ways.append((s, d + 1, n))
        s, d, n = best(i, j - 1)
        ways.append((s, d, n + 1))
        return min(ways, key=lambda way: (sum(way), -way[0]))

    return best(len(reference), len(hypothesis))


@pytest.fixture(scope="module")
def pairs():
    """Returns pairs of strings of 0 to 14 symbols, more than are compared at a time."""
    random = np.random.default_rng(0)
    made = [("", ""), ("", "ab"), ("ab", ""), ("ab", "ba"), ("abc", "abc")]
    for _ in range(600):
        sides = ["".join(random.choice(list("abc"), random.integers(0, 15))) for _ in range(2)]
        made.append(tuple(sides))
    return made


def test_counts_equal_the_counts_of_a_recursion(pairs):
    counts = count_edits(*zip(*pairs, strict=True))
    found = np.stack(counts).T
    for pair, row in zip(pairs, found.tolist(), strict=True):
        assert tuple(row) == slow_counts(*pair), pair
    assert np.array_equal(counts.edits, found.sum(1))


def test_an_alignment_contains_both_sequences_and_counts_edits(pairs):
    for reference, hypothesis in pairs[:100]:
        edits = align(reference, hypothesis)
        assert [e.reference for e in edits if e.kind != "insertion"] == list(reference)
        assert [e.hypothesis for e in edits if e.kind != "deletion"] == list(hypothesis)
        assert all((e.reference == e.hypothesis) == (e.kind == "equal") for e in edits)
        assert all((e.reference is None) == (e.kind == "insertion") for e in edits)
        assert all((e.hypothesis is None) == (e.kind == "deletion") for e in edits)
        kinds = [e.kind for e in edits]
        found = tuple(kinds.count(kind) for kind in ("substitution", "deletion", "insertion"))
        assert found == slow_counts(reference, hypothesis)


def test_words_are_compared_whole():
    reference, hypothesis = "one two three four".split(), "one too three".split()
    assert [int(count[0]) for count in count_edits([reference], [hypothesis])] == [1, 1, 0]
    assert [e.kind for e in align(reference, hypothesis)] == ["equal", "substitution", "equal", "deletion"]


def test_no_pairs_give_no_counts_and_unequal_numbers_are_refused():
    assert count_edits([], []).edits.shape == (0,)
    with pytest.raises(ValueError, match="argument"):
        count_edits([["a"]], [])
