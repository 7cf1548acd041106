"""Joins a knowledge graph and users' interactions into one graph.

Wang et al. describe this graph ("KGAT: Knowledge Graph Attention Network for Recommendation", KDD 2019, section 2).
"""

from dataclasses import dataclass

import numpy as np

from data.knowledge_graph.catalogue import Catalogue

INTERACT, INTERACTED_BY = 0, 1
NUM_INTERACTION_RELATIONS = 2


@dataclass(frozen=True)
class Edges:
    """Distinct directed edges, sorted by head, then tail, then relation.

    Nodes are items, from 0, then other entities, then users: user u is node num_entities + u. Relation 0 is "interact"
    (user to item), and relation 1 its inverse. The knowledge graph has R relations; its relation r becomes 2 + r, and
    the inverse 2 + R + r.

    head, tail, relation: (E,) int32.
    num_relations: 2 + 2 R.
    """

    head: np.ndarray
    tail: np.ndarray
    relation: np.ndarray
    num_nodes: int
    num_relations: int


def collaborative_graph(catalogue: Catalogue) -> Edges:
    """Builds the edges of training interactions and triples, in both directions."""
    users = (catalogue.train.users + catalogue.num_entities).astype(np.int32)
    items = catalogue.train.items
    heads, relations, tails = catalogue.triples.T
    to_items, to_users = (np.full(len(items), relation, np.int32) for relation in (INTERACT, INTERACTED_BY))
    relations = relations + np.int32(NUM_INTERACTION_RELATIONS)
    head = np.concatenate([users, items, heads, tails])
    tail = np.concatenate([items, users, tails, heads])
    relation = np.concatenate([to_items, to_users, relations, relations + np.int32(catalogue.num_relations)])
    order = np.lexsort((relation, tail, head))
    num_relations = NUM_INTERACTION_RELATIONS + 2 * catalogue.num_relations
    num_nodes = catalogue.num_entities + catalogue.num_users
    return Edges(head[order], tail[order], relation[order], num_nodes, num_relations)


def named_relation(catalogue: Catalogue, relation: int) -> tuple[str, bool]:
    """Returns the name of an edge's relation, and whether the relation is inverse."""
    if relation < NUM_INTERACTION_RELATIONS:
        return "interact", relation == INTERACTED_BY
    inverse, number = divmod(relation - NUM_INTERACTION_RELATIONS, catalogue.num_relations)
    return (catalogue.relation_names[number] if catalogue.relation_names else f"r{number}"), inverse == 1
