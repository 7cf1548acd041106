"""Finds the path with the highest attention between two nodes of a graph."""

import numpy as np

MOST_HOPS = 3
"""Maximum number of edges in a path, for example user - item - shared entity - new item."""


class PathFinder:
    """Finds the path of at most MOST_HOPS directed edges that has the highest attention.

    The attention of a path is the product of the attention of its edges.

    head, tail: (E,) integers, sorted by head. attention: (E,) floats, at least 0.
    """

    def __init__(self, head: np.ndarray, tail: np.ndarray, attention: np.ndarray, num_nodes: int) -> None:
        nodes = np.arange(num_nodes + 1)
        self._head, self._tail, self._attention = head, tail, attention
        self._out = np.searchsorted(head, nodes)
        self._by_tail = np.argsort(tail, kind="stable")
        self._into = np.searchsorted(tail[self._by_tail], nodes)

    def best(self, source: int, targets: np.ndarray) -> list[list[int]]:
        """Returns the edge indices of the best path from the source to each target; [] if there is no path.

        targets: (n,) integers. Among paths of equal attention, the shortest wins.
        """
        attention = np.zeros(len(self._out) - 1)
        attention[source] = 1.0
        levels = [(attention, np.full(len(attention), -1))]
        for _ in range(MOST_HOPS - 1):
            levels.append(self._expanded(levels[-1][0]))
        return [self._path(int(target), levels) for target in targets]

    def _expanded(self, attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Extends paths by one edge. Returns the attention (0: no path) and last edge of the best path to each node."""
        nodes = np.flatnonzero(attention)
        edges = _ranges(self._out[nodes], self._out[nodes + 1])
        values = attention[self._head[edges]] * self._attention[edges]
        order = np.argsort(values, kind="stable")  # ascending, because the last value assigned to a node wins
        edges, values = edges[order], values[order]
        best, by_edge = np.zeros(len(attention)), np.full(len(attention), -1)
        best[self._tail[edges]], by_edge[self._tail[edges]] = values, edges
        return best, by_edge

    def _path(self, target: int, levels: list[tuple[np.ndarray, np.ndarray]]) -> list[int]:
        """Returns the best path to a node. levels[n]: attention and last edge of each node's best path of n edges."""
        candidates = [(values[target], hops, int(edges[target])) for hops, (values, edges) in enumerate(levels)][1:]
        into = self._by_tail[self._into[target] : self._into[target + 1]]
        if len(into):
            values = levels[-1][0][self._head[into]] * self._attention[into]
            candidates.append((values.max(), MOST_HOPS, int(into[values.argmax()])))
        value, hops, edge = max(candidates, key=lambda candidate: candidate[0])
        path: list[int] = []
        while value > 0 and hops > 0:
            path.insert(0, edge)
            hops -= 1
            edge = int(levels[hops][1][self._head[edge]])
        return path


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Returns the integers from starts[i] to stops[i] - 1, concatenated for all i."""
    lengths = stops - starts
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
