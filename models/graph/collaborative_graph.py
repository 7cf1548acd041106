"""Collaborative knowledge graph of KGAT (Wang et al., KDD 2019): users, items, entities and typed edges."""

from typing import Literal

import torch
from torch import Tensor, nn

from models.graph.sparse import SparseMatrix

Laplacian = Literal["random-walk", "symmetric", "reference"]
Softmax = Literal["separate", "coalesced"]


class CollaborativeGraph(nn.Module):
    """Graph of directed edges (head, relation, tail); edges with the same head and tail are called parallel.

    The sparse matrix `matrix`, which propagates node states, has one entry per (head, tail) pair: the sum of the values
    of parallel edges. Methods take and return edge values, (E,), in the edge order of the constructor.
    """

    head: Tensor
    tail: Tensor
    by_relation: Tensor
    first_edge: Tensor
    further_edges: Tensor
    entry_of_further: Tensor

    def __init__(self, head: Tensor, tail: Tensor, relation: Tensor, num_nodes: int, num_relations: int) -> None:
        """Creates the graph. head, tail, relation: (E,) integers that form distinct triples in ascending order."""
        super().__init__()
        self.num_nodes = num_nodes
        self.num_relations = num_relations
        starts_entry = torch.ones(len(head), dtype=torch.bool)
        starts_entry[1:] = (head[1:] != head[:-1]) | (tail[1:] != tail[:-1])
        first_edge, further_edges = starts_entry.nonzero().squeeze(1), (~starts_entry).nonzero().squeeze(1)
        self.matrix = SparseMatrix(head[first_edge], tail[first_edge], num_nodes, torch.get_default_dtype())
        self.sizes = torch.bincount(relation, minlength=num_relations).tolist()  # number of edges of each relation
        for name, value in (
            ("head", head),
            ("tail", tail),
            ("by_relation", relation.argsort(stable=True)),
            ("first_edge", first_edge),
            ("further_edges", further_edges),
            ("entry_of_further", starts_entry.cumsum(0)[further_edges] - 1),
        ):
            self.register_buffer(name, value.int(), persistent=False)

    def edges_by_relation(self) -> tuple[Tensor, ...]:
        """Returns the indices of each relation's edges, as num_relations int32 tensors."""
        return self.by_relation.split(self.sizes)

    def merge(self, values: Tensor) -> Tensor:
        """Sums the values of parallel edges: (E,) -> (entries,)."""
        merged = values.index_select(0, self.first_edge)
        return merged.index_add_(0, self.entry_of_further, values.index_select(0, self.further_edges))

    def laplacian(self, kind: Laplacian, dtype: torch.dtype) -> Tensor:
        """Returns normalised edge values, (E,). Degrees count only edges of the same relation.

        random-walk: 1 / out-degree of the head. symmetric: 1 / sqrt(out-degree of the head * in-degree of the tail).
        reference: 1 / sqrt(out-degree of the head * out-degree of the tail), or 0 if the tail has out-degree 0, which
        is the case for nearly all edges. KGAT's public code calls this variant "symmetric".
        """
        values = torch.empty(len(self.head), dtype=dtype, device=self.head.device)
        for edges in self.edges_by_relation():
            head, tail = self.head.index_select(0, edges), self.tail.index_select(0, edges)
            out_degree = torch.bincount(head, minlength=self.num_nodes).to(dtype)
            if kind == "random-walk":
                values[edges.long()] = 1 / out_degree.index_select(0, head)
                continue
            degree = torch.bincount(tail, minlength=self.num_nodes).to(dtype) if kind == "symmetric" else out_degree
            scale = torch.where(degree > 0, degree.rsqrt(), 0)
            values[edges.long()] = out_degree.index_select(0, head).rsqrt() * scale.index_select(0, tail)
        return values

    def softmax(self, logits: Tensor, kind: Softmax) -> Tensor:
        """Applies softmax over all edges of each head: (E,) -> (E,).

        separate: every edge is a term of the softmax (KGAT, equation 5). coalesced: the logits of parallel edges are
        summed into one term, whose probability the edges share equally, as in LunaBlack's PyTorch port of KGAT.
        """
        if kind == "separate":
            return self._normalise(logits, self.head)
        of_pairs = self._normalise(self.merge(logits), self.head.index_select(0, self.first_edge))
        num_parallel = self.merge(torch.ones_like(logits))
        return self._spread(of_pairs / num_parallel)

    def _normalise(self, logits: Tensor, head: Tensor) -> Tensor:
        """Applies softmax over consecutive values with the same head."""
        lengths = torch.bincount(head, minlength=self.num_nodes)
        largest = torch.segment_reduce(logits, "max", lengths=lengths, unsafe=True)
        exponentials = (logits - largest.index_select(0, head)).exp_()
        sums = torch.segment_reduce(exponentials, "sum", lengths=lengths, unsafe=True)
        return exponentials.div_(sums.index_select(0, head))

    def _spread(self, values: Tensor) -> Tensor:
        """Copies the value of each (head, tail) pair to its edges: (entries,) -> (E,)."""
        spread = values.new_empty(len(self.head))
        spread[self.first_edge.long()] = values
        spread[self.further_edges.long()] = values.index_select(0, self.entry_of_further)
        return spread
