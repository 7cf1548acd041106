from collections import Counter
from dataclasses import replace

import numpy as np

from data.knowledge_graph.edges import collaborative_graph


def slow_edges(catalogue) -> Counter:
    """Returns how often each (head, tail, relation) occurs."""
    edges = Counter()
    for user in range(catalogue.num_users):
        for item in catalogue.train.of(user).tolist():
            node = catalogue.num_entities + user
            edges[node, item, 0] += 1
            edges[item, node, 1] += 1
    for head, relation, tail in catalogue.triples.tolist():
        edges[head, tail, 2 + relation] += 1
        edges[tail, head, 2 + catalogue.num_relations + relation] += 1
    return edges


def test_edges_equal_a_slow_reference(catalogue) -> None:
    edges = collaborative_graph(catalogue)
    found = [*zip(edges.head.tolist(), edges.tail.tolist(), edges.relation.tolist(), strict=True)]
    expected = slow_edges(catalogue)
    assert found == sorted(expected) and max(expected.values()) == 1
    assert len(edges.head) == 2 * (len(catalogue.train) + len(catalogue.triples))
    assert edges.num_nodes == catalogue.num_entities + catalogue.num_users
    assert edges.num_relations == 2 + 2 * catalogue.num_relations
    assert {edges.head.dtype, edges.tail.dtype, edges.relation.dtype} == {np.dtype(np.int32)}


def test_without_a_graph_only_interactions_are_edges(catalogue) -> None:
    bare = replace(catalogue, triples=catalogue.triples[:0])
    edges = collaborative_graph(bare)
    assert [*zip(edges.head.tolist(), edges.tail.tolist(), edges.relation.tolist(), strict=True)] == sorted(
        slow_edges(bare)
    )
    assert edges.num_relations == 2 and set(edges.relation.tolist()) == {0, 1}
