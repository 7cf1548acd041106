"""Tests best paths against a search of all paths."""

import itertools

import numpy as np
import pytest

from models.graph.paths import MOST_HOPS, PathFinder

NUM_NODES = 9


@pytest.fixture
def graph():
    random = np.random.default_rng(0)
    pairs = np.unique(random.integers(0, NUM_NODES, (22, 2)), axis=0)
    head, tail = np.concatenate([pairs, pairs[:3]]).T  # three edges have a parallel one
    order = np.argsort(head, kind="stable")
    return head[order], tail[order], random.random(len(head))


def all_paths(head, tail, source, target):
    for hops in range(1, MOST_HOPS + 1):
        for edges in itertools.product(range(len(head)), repeat=hops):
            nodes = [source, *(tail[edge] for edge in edges)]
            if nodes[-1] == target and all(head[edge] == node for edge, node in zip(edges, nodes, strict=False)):
                yield edges


@pytest.mark.parametrize("source", [0, 4])
def test_the_explained_path_has_the_most_attention(graph, source):
    head, tail, attention = graph
    targets = np.array([node for node in range(NUM_NODES) if node != source])
    found = PathFinder(head, tail, attention, NUM_NODES).best(source, targets)
    for target, path in zip(targets, found, strict=True):
        values = {edges: np.prod(attention[list(edges)]) for edges in all_paths(head, tail, source, target)}
        assert tuple(path) == max(values, key=values.get, default=()), (source, target)
    assert any(len(path) == MOST_HOPS for path in found)


def test_of_equal_candidates_the_shortest_is_chosen():
    head, tail = np.array([0, 0, 1]), np.array([1, 2, 2])
    assert PathFinder(head, tail, np.array([1.0, 0.5, 0.5]), 3).best(0, np.array([2])) == [[1]]


def test_a_pair_may_have_no_path():
    found = PathFinder(np.array([0, 1]), np.array([1, 0]), np.array([1.0, 1.0]), 4).best(0, np.array([2, 3]))
    assert found == [[], []]
