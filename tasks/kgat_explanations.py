"""Why an item is recommended, in KGAT's terms: the path of highest attention from the user to it."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from data.knowledge_graph.catalogue import Catalogue
from data.knowledge_graph.edges import Edges, forward_relation
from models.graph.paths import PathFinder


def forward_names(catalogue: Catalogue) -> list[str]:
    """Of interact, and of the relations of the knowledge graph."""
    return ["interact", *(catalogue.relation_names or (f"r{i}" for i in range(catalogue.num_relations)))]


def relation_names(catalogue: Catalogue) -> list[str]:
    """Of each relation of the edges; an inverse has `^-1` behind."""
    names = forward_names(catalogue)
    directed = (forward_relation(i, catalogue.num_relations) for i in range(2 + 2 * catalogue.num_relations))
    return [names[i] + ("^-1" if is_inverse else "") for i, is_inverse in directed]


class Explanations:
    """Paths of highest attention as text. attention: (E,), of each edge."""

    def __init__(self, catalogue: Catalogue, edges: Edges, attention: Tensor) -> None:
        self._catalogue = catalogue
        self._edges = edges
        self._attention = attention.double().cpu().numpy()
        self._names = forward_names(catalogue)
        self._finder = PathFinder(edges.head, edges.tail, self._attention, edges.num_nodes)

    def of(self, user: int, items: Sequence[int]) -> list[tuple[float, str]]:
        """The attention of the best path to each item, and the path; 0 and an empty text where there is none."""
        paths = self._finder.best(self._catalogue.num_entities + user, np.asarray(items))
        return [(float(np.prod(self._attention[path])) if path else 0.0, self._text(path)) for path in paths]

    def _text(self, path: Sequence[int]) -> str:
        parts = [self._node(int(self._edges.head[path[0]]))] if path else []
        for edge in path:
            relation, is_inverse = forward_relation(int(self._edges.relation[edge]), self._catalogue.num_relations)
            name = self._names[relation]
            parts += [f"<-{name}-" if is_inverse else f"-{name}->", self._node(int(self._edges.tail[edge]))]
        return " ".join(parts)

    def _node(self, node: int) -> str:
        if node >= self._catalogue.num_entities:
            return f"user {node - self._catalogue.num_entities}"
        return f"{'item' if node < self._catalogue.num_items else 'entity'} {node}"
