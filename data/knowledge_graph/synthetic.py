"""Synthetic data: readers who borrow books, and a graph of facts that the few interactions do not show.

A book has an author and a genre, and may belong to a series; all books of a series have the same author. An author
writes for an imprint, mostly in one genre. A reader follows two authors and a series, and likes a genre and an imprint;
the more of these a book matches, the more likely the reader is to borrow it. Half of all books are better known than
the other half.

The year and the printer of a book do not affect what readers borrow.
"""

from pathlib import Path

import numpy as np

from data.knowledge_graph.catalogue import Catalogue, ItemLists
from data.knowledge_graph.splits import TEST_STREAM, hold_out, with_validation
from trainer.loading.cache import Arrays, cached_arrays
from trainer.loading.counter_random import uniform

NUM_USERS = 700
NUM_ITEMS = 900
NUM_ENTITIES = {"author": 45, "genre": 15, "series": 90, "imprint": 12, "year": 30, "printer": 40}
"""Numbers of entities by kind; their ids follow the items' ids in this order."""
RELATIONS = ("written_by", "of_genre", "part_of", "writes_for", "published_in", "printed_by")
"""Names of relations; all join items to entities except writes_for, which joins authors to imprints."""
LENGTHS = (6, 24)
"""Smallest and largest number of items per user; short lists are more frequent."""
TEST_SHARE = 0.3

_IN_SERIES = 0.5
_OF_MAIN_GENRE = 0.75
_WELL_KNOWN = 2.0
"""Factor on every reader's interest in a well-known book."""
_INTERESTS = {"author": (200.0, 200.0), "series": (150.0,), "genre": (4.0,), "imprint": (20.0,)}
"""Amounts that liked entities, by kind, add to a user's interest in a book, which is otherwise 1."""

_SEED = 0
_FORMAT_VERSION = 1
_ITEM_STREAM, _SERIES_STREAM, _AUTHOR_STREAM, _INTEREST_STREAM, _LENGTH_STREAM, _CHOICE_STREAM = range(6)


def load_synthetic_catalogue(cache_dir: Path, *, val_share: float, seed: int, selects_on_test: bool) -> Catalogue:
    """Generates about 7,000 interactions of 700 users with 900 items, and 4,000 triples.

    The test set, the triples, and the union of training and validation are fixed; seed determines the validation set.
    val_share, selects_on_test: as for `load_catalogue`.
    """
    arrays = cached_arrays(cache_dir, f"knowledge_graph_synthetic-{_FORMAT_VERSION}", generate)
    lists = ItemLists(arrays["offsets"], arrays["items"])
    train, test = hold_out(lists, TEST_SHARE, _SEED, TEST_STREAM)
    published = Catalogue(
        NUM_USERS, NUM_ITEMS, train, ItemLists.empty(NUM_USERS), test, arrays["triples"], RELATIONS
    )  # fmt: skip
    return with_validation(published, val_share=val_share, seed=seed, selects_on_test=selects_on_test)


def generate() -> Arrays:
    """Returns `offsets` and `items` of the ItemLists of all interactions, and `triples` of the Catalogue.

    The arrays are equal on every machine: computing them takes only counter-based hashing, sums, products and
    comparisons.
    """
    traits = _traits()
    users, items = _borrowed(_interest(traits))
    lists = ItemLists.of_pairs(users, items, NUM_USERS)
    return {"offsets": lists.offsets, "items": lists.items, "triples": _triples(traits)}


def _traits() -> dict[str, np.ndarray]:
    """Returns each item's author, genre and so on, (NUM_ITEMS,) each; values count from 0, and -1 means no series."""
    draws = _uniform(_ITEM_STREAM, NUM_ITEMS, 8)
    author_of_series = _below(NUM_ENTITIES["author"], _uniform(_SERIES_STREAM, NUM_ENTITIES["series"], 1)[:, 0])
    of_author = _uniform(_AUTHOR_STREAM, NUM_ENTITIES["author"], 2)
    series = np.where(draws[:, 0] < _IN_SERIES, _below(NUM_ENTITIES["series"], draws[:, 1]), -1)
    author = np.where(series >= 0, author_of_series[series], _below(NUM_ENTITIES["author"], draws[:, 2]))
    main_genre = _below(NUM_ENTITIES["genre"], of_author[:, 0])[author]
    genre = np.where(draws[:, 3] < _OF_MAIN_GENRE, main_genre, _below(NUM_ENTITIES["genre"], draws[:, 4]))
    return {
        "author": author,
        "genre": genre,
        "series": series,
        "imprint": _below(NUM_ENTITIES["imprint"], of_author[:, 1])[author],
        "year": _below(NUM_ENTITIES["year"], draws[:, 5]),
        "printer": _below(NUM_ENTITIES["printer"], draws[:, 6]),
        "is_known": draws[:, 7] < 0.5,
    }


def _interest(traits: dict[str, np.ndarray]) -> np.ndarray:
    """Returns each user's interest in each item, positive numbers (NUM_USERS, NUM_ITEMS)."""
    interest = np.ones((NUM_USERS, NUM_ITEMS))
    draws = iter(_uniform(_INTEREST_STREAM, NUM_USERS, sum(map(len, _INTERESTS.values()))).T)
    for kind, strengths in _INTERESTS.items():
        for strength in strengths:
            liked = _below(NUM_ENTITIES[kind], next(draws))
            interest += strength * (traits[kind] == liked[:, None])
    return interest * np.where(traits["is_known"], _WELL_KNOWN, 1.0)


def _borrowed(interest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws distinct pairs of user and item, (n,) int64 each, in proportion to interest.

    Sets the interest in drawn items to 0, in place.
    """
    shortest, longest = LENGTHS
    lengths = shortest + _below(longest + 1 - shortest, _uniform(_LENGTH_STREAM, NUM_USERS, 3).min(axis=1))
    draws = _uniform(_CHOICE_STREAM, NUM_USERS, longest)
    users = np.arange(NUM_USERS)
    pairs = []
    for step in range(longest):
        users = users[lengths[users] > step]
        cumulated = np.cumsum(interest[users], axis=1)
        items = np.argmax(cumulated > draws[users, step, None] * cumulated[:, -1:], axis=1)
        interest[users, items] = 0
        pairs.append((users, items))
    all_users, all_items = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return all_users, all_items


def _triples(traits: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the triples of the graph, (m, 3) int32, ascending."""
    starts = NUM_ITEMS + np.cumsum([0, *NUM_ENTITIES.values()])
    first = dict(zip(NUM_ENTITIES, starts.tolist(), strict=False))
    triples = []
    for relation, (name, kind) in enumerate(zip(RELATIONS, NUM_ENTITIES, strict=True)):
        heads = first["author"] + traits["author"] if name == "writes_for" else np.arange(NUM_ITEMS)
        joined = traits[kind] >= 0
        tails = first[kind] + traits[kind]
        triples.append(np.stack([heads, np.full(NUM_ITEMS, relation), tails], axis=1)[joined])
    return np.unique(np.concatenate(triples), axis=0).astype(np.int32)


def _uniform(stream: int, num: int, width: int) -> np.ndarray:
    """Draws uniform numbers (num, width), float64 in [0, 1)."""
    return uniform(_SEED, 0, np.arange(num), (width,), stream).astype(np.float64)


def _below(limit: int, draws: np.ndarray) -> np.ndarray:
    """Maps draws in [0, 1) to uniform integers from 0 to limit - 1, int64."""
    return (limit * draws).astype(np.int64)
