"""Tests samples against brute force: what is drawn, how often, and that it does not depend on the batch."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from data.knowledge_graph.catalogue import ItemLists
from data.knowledge_graph.edges import Edges, collaborative_graph
from data.knowledge_graph.samples import BprSamples, Triples, UserItems, UsersToRank
from tests.helpers.on_device import assert_equal_on_a_device
from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys


def take(dataset, index, epoch: int = 0) -> dict[str, np.ndarray]:
    return dataset.__getitems__(SampleKeys(np.asarray(index), epoch))


def many_epochs(dataset, num_epochs: int) -> dict[str, np.ndarray]:
    batches = [take(dataset, np.arange(len(dataset)), epoch) for epoch in range(num_epochs)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_uniform(drawn: np.ndarray, expected: list[int]) -> None:
    """Asserts that all of expected, and nothing else, is drawn about equally often: within six standard deviations."""
    values, times = np.unique(drawn, return_counts=True)
    assert set(values.tolist()) <= set(expected)
    times = np.append(times, np.zeros(len(expected) - len(times)))
    mean = len(drawn) / len(expected)
    chi_square, freedom = ((times - mean) ** 2 / mean).sum(), len(expected) - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom) + 3


def datasets(catalogue, seed: int = 0) -> dict[str, BprSamples | Triples]:
    return {
        "users": BprSamples(catalogue, seed),
        "interactions": BprSamples(catalogue, seed, "interactions"),
        "triples": Triples(collaborative_graph(catalogue), seed),
    }


@pytest.mark.parametrize("name", ["users", "interactions", "triples"])
def test_a_sample_is_the_same_in_every_batch(catalogue, name) -> None:
    dataset = datasets(catalogue)[name]
    whole = take(dataset, np.arange(len(dataset)), epoch=3)
    shuffled = np.random.default_rng(0).permutation(len(dataset))
    parts = [take(pickle.loads(pickle.dumps(dataset)), part, epoch=3) for part in np.array_split(shuffled, 7)]
    for column, values in whole.items():
        assert values.dtype == np.int64 and values.shape == (len(dataset),)
        np.testing.assert_array_equal(np.concatenate([part[column] for part in parts]), values[shuffled])
    for other in (take(dataset, np.arange(len(dataset)), epoch=4), take(datasets(catalogue, 1)[name], shuffled, 3)):
        assert (other["negative"] != whole["negative"]).any()


def test_samples_on_a_device_equal_samples_on_the_host(catalogue) -> None:
    assert_equal_on_a_device(
        [
            *datasets(catalogue).values(),
            UserItems(catalogue),
            *(UsersToRank(catalogue, name) for name in ("val", "test")),
        ]
    )


@pytest.mark.parametrize("draw", ["users", "interactions"])
def test_negatives_are_uniform_among_the_other_items(catalogue, draw) -> None:
    samples = many_epochs(BprSamples(catalogue, 0, draw), 300)
    for user in range(catalogue.num_users):
        own = catalogue.train.of(user).tolist()
        of_user = samples["user"] == user
        assert of_user.any() == bool(own)
        if own:
            others = sorted(set(range(catalogue.num_items)) - set(own))
            assert_uniform(samples["negative"][of_user], others)
            assert_uniform(samples["positive"][of_user], own)


def test_users_take_turns(catalogue) -> None:
    dataset = BprSamples(catalogue, 0)
    assert len(dataset) == len(catalogue.train)
    users = np.flatnonzero(catalogue.train.sizes).tolist()
    drawn = [take(dataset, np.arange(len(dataset)), epoch)["user"] for epoch in range(200)]
    for epoch in drawn:
        for start in range(0, len(dataset), len(users)):
            turn = epoch[start : start + len(users)].tolist()
            assert len(set(turn)) == len(turn) and set(turn) <= set(users)
    assert_uniform(np.array([epoch[0] for epoch in drawn]), users)
    assert_uniform(np.array([epoch[len(users)] for epoch in drawn]), users)


def test_each_interaction_is_a_sample(catalogue) -> None:
    dataset = BprSamples(catalogue, 0, "interactions")
    batch = take(dataset, np.arange(len(dataset)))
    np.testing.assert_array_equal(batch["user"], catalogue.train.users)
    np.testing.assert_array_equal(batch["positive"], catalogue.train.items)


def test_a_sample_of_softmax_is_a_user_with_all_items(catalogue) -> None:
    dataset = UserItems(catalogue)
    users = np.flatnonzero(catalogue.train.sizes)
    batch = take(dataset, np.arange(len(dataset))[::-1])
    np.testing.assert_array_equal(batch["user"], users[::-1])
    own = [items[items < catalogue.num_items].tolist() for items in batch["items"]]
    assert own == [catalogue.train.of(user).tolist() for user in batch["user"]]
    assert batch["weight"].tolist() == [len(items) for items in own]
    assert batch["items"].shape[1] == max(map(len, own))


def test_triples_are_edges_and_negatives_are_not(catalogue) -> None:
    edges = collaborative_graph(catalogue)
    dataset = Triples(edges, 0)
    assert len(dataset) == len(edges.head)
    samples = many_epochs(dataset, 60)
    heads, relations, tails = edges.head, edges.relation, edges.tail
    for head in set(heads.tolist()):
        of_head = samples["head"] == head
        # Numbers each edge of the head in order to count it.
        drawn = samples["relation"][of_head] * edges.num_nodes + samples["tail"][of_head]
        assert_uniform(drawn, (relations[heads == head].astype(int) * edges.num_nodes + tails[heads == head]).tolist())
    for head, relation in {*zip(heads.tolist(), relations.tolist(), strict=True)}:
        drawn = samples["negative"][(samples["head"] == head) & (samples["relation"] == relation)]
        none = set(range(edges.num_nodes)) - set(tails[(heads == head) & (relations == relation)].tolist())
        assert_uniform(drawn, sorted(none))


def test_heads_take_turns(catalogue) -> None:
    dataset = Triples(collaborative_graph(catalogue), 0)
    heads = take(dataset, np.arange(len(dataset)))["head"].tolist()
    num_heads = len(set(heads))
    for start in range(0, len(heads), num_heads):
        turn = heads[start : start + num_heads]
        assert len(set(turn)) == len(turn)


def test_users_to_rank_are_selected(catalogue) -> None:
    for split, positives, known in (
        ("val", catalogue.val, [catalogue.train]),
        ("test", catalogue.test, [catalogue.train, catalogue.val]),
    ):
        dataset = UsersToRank(catalogue, split)
        batch = take(dataset, np.arange(len(dataset)))
        users = [user for user in range(catalogue.num_users) if len(positives.of(user))]
        assert sorted(dataset.users.tolist()) == users and batch["user"].tolist() == dataset.users.tolist()
        for row, user in enumerate(batch["user"]):
            assert without(batch["positives"][row], catalogue.num_items) == positives.of(user).tolist()
            seen = sorted(item for lists in known for item in lists.of(user).tolist())
            assert without(batch["seen"][row], catalogue.num_items) == seen
        lengths = (batch["seen"] < catalogue.num_items).sum(axis=1)
        assert (np.diff(lengths) >= 0).all() and lengths.max() == batch["seen"].shape[1]
        first = take(dataset, [0])
        assert first["seen"].shape == (1, lengths[0]) and {array.dtype for array in batch.values()} == {np.dtype("i8")}


def without(row: np.ndarray, padding: int) -> list[int]:
    """Returns the row without its padding, which must all be at the end."""
    kept = row[row != padding].tolist()
    assert row[: len(kept)].tolist() == kept
    return kept


def test_validation_items_are_not_excluded_if_validation_is_the_test(catalogue) -> None:
    published = replace(catalogue, val=catalogue.test)
    for split in ("val", "test"):
        dataset = UsersToRank(published, split)
        batch = take(dataset, np.arange(len(dataset)))
        for row, user in enumerate(batch["user"]):
            assert without(batch["positives"][row], catalogue.num_items) == catalogue.test.of(user).tolist()
            assert without(batch["seen"][row], catalogue.num_items) == catalogue.train.of(user).tolist()


def test_a_user_without_negatives_is_named(catalogue) -> None:
    users, items = np.array([1, *[3] * catalogue.num_items]), np.array([0, *range(catalogue.num_items)])
    greedy = replace(catalogue, train=ItemLists.of_pairs(users, items, catalogue.num_users))
    with pytest.raises(UserError, match=r"^--data-dir: user 3 has all 17 items in training, so no item is left"):
        BprSamples(greedy, 0)
    three = np.arange(3, dtype=np.int32)
    edges = Edges(np.full(3, 1, np.int32), three, np.full(3, 2, np.int32), num_nodes=3, num_relations=4)
    with pytest.raises(UserError, match=r"^--data-dir: relation 2 joins node 1 to all 3 nodes"):
        Triples(edges, 0)
