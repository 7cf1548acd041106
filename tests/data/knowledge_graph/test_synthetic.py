import hashlib

import numpy as np
import pytest

from data.knowledge_graph.synthetic import (
    LENGTHS,
    NUM_ENTITIES,
    NUM_ITEMS,
    NUM_USERS,
    RELATIONS,
    generate,
    load_synthetic_catalogue,
)

CONTENT = {"offsets": "f3abf7e703f8e825", "items": "05dc7500fe98ed5d", "triples": "43b44fbd91afab10"}


@pytest.fixture(scope="module")
def load(cache_dir):
    def run(**settings):
        settings = {"val_share": 0.1, "seed": 0, "selects_on_test": False} | settings
        return load_synthetic_catalogue(cache_dir, **settings)

    return run


def test_the_content_matches_its_digest() -> None:
    # Changed content needs a new _FORMAT_VERSION; otherwise old caches are read.
    found = {name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in generate().items()}
    assert found == CONTENT


def test_content_of_the_catalogue(load) -> None:
    catalogue = load()
    assert (catalogue.num_users, catalogue.num_items) == (NUM_USERS, NUM_ITEMS)
    assert catalogue.num_entities == NUM_ITEMS + sum(NUM_ENTITIES.values())
    assert catalogue.has_graph and catalogue.relation_names == RELATIONS
    everything = catalogue.train.joined_with(catalogue.val).joined_with(catalogue.test)
    assert len(everything) == len(catalogue.train) + len(catalogue.val) + len(catalogue.test)
    assert everything.sizes.min() == LENGTHS[0] and everything.sizes.max() <= LENGTHS[1]
    assert catalogue.train.sizes.min() > 0
    first = NUM_ITEMS + np.cumsum([0, *NUM_ENTITIES.values()])
    for relation, name in enumerate(RELATIONS):
        heads, _, tails = catalogue.triples[catalogue.triples[:, 1] == relation].T
        assert len(np.unique(heads)) == len(heads)  # each head has one author, one year, ...
        is_author = (heads >= first[0]) & (heads < first[1])
        assert is_author.all() if name == "writes_for" else (heads < NUM_ITEMS).all()
        assert ((tails >= first[relation]) & (tails < first[relation + 1])).all()


def test_only_validation_depends_on_the_settings(load) -> None:
    catalogue, other, published = load(), load(seed=1), load(selects_on_test=True)
    np.testing.assert_array_equal(other.test.items, catalogue.test.items)
    np.testing.assert_array_equal(other.triples, catalogue.triples)
    assert not np.array_equal(other.val.items, catalogue.val.items)
    assert published.selects_on_test and len(published.train) == len(catalogue.train) + len(catalogue.val)


def test_generated_tastes_follow_the_graph_except_for_distractors(load) -> None:
    """Compares how often a user's own and others' test items share an entity with the user's training items."""
    catalogue = load()
    strangers = np.roll(catalogue.test.items, len(catalogue.test) // 2)
    gain = {}
    for relation in (0, 1, 2, 4, 5):
        name, entity = RELATIONS[relation], np.arange(-1, -NUM_ITEMS - 1, -1)  # unique where an item has no entity
        heads, _, tails = catalogue.triples[catalogue.triples[:, 1] == relation].T
        entity[heads] = tails
        known = [set(entity[catalogue.train.of(user)]) for user in range(NUM_USERS)]
        own, strange = (
            np.mean([entity[item] in known[user] for user, item in zip(catalogue.test.users, items, strict=True)])
            for items in (catalogue.test.items, strangers)
        )
        gain[name] = own / strange
    assert gain["written_by"] > 3 and gain["part_of"] > 5 and gain["of_genre"] > 1.3
    assert 0.9 < gain["published_in"] < 1.1 and 0.9 < gain["printed_by"] < 1.1


def test_generated_items_have_few_interactions(load) -> None:
    num_users = np.bincount(load().train.items, minlength=NUM_ITEMS)
    assert 4 <= np.median(num_users) <= 8 and (num_users <= 3).mean() > 0.1
