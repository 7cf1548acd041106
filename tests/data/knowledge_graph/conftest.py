"""Provides a small catalogue with a user without items, parallel triples and an item that nobody has."""

import numpy as np
import pytest

from data.knowledge_graph.catalogue import Catalogue, ItemLists

NUM_USERS, NUM_ITEMS, NUM_ENTITIES, NUM_RELATIONS = 23, 17, 25, 3


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    rng = np.random.default_rng(0)
    train, val, test = [], [], []
    for user in range(NUM_USERS):
        items = rng.permutation(NUM_ITEMS - 1)
        sizes = (0, 0, 0) if user == 5 else (NUM_ITEMS - 1, 0, 0) if user == 6 else rng.integers((1, 0, 0), (9, 3, 4))
        ends = np.cumsum(sizes)
        for pairs, start, end in zip((train, val, test), (0, *ends), ends, strict=False):
            pairs += [(user, item) for item in items[start:end]]
    triples = {(h, r, t) for h, r, t in rng.integers(0, (NUM_ENTITIES, NUM_RELATIONS, NUM_ENTITIES), (60, 3)).tolist()}
    triples |= {(2, 0, 20), (2, 1, 20), (2, 2, 20), (20, 0, 2), (4, 1, 4)}
    train, val, test = (ItemLists.of_pairs(*np.array(pairs).T, NUM_USERS) for pairs in (train, val, test))
    triples = np.array(sorted(triples), np.int32)
    return Catalogue(NUM_USERS, NUM_ITEMS, train, val, test, triples, ())
