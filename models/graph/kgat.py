"""KGAT: knowledge graph attention network for recommendation (Wang et al., KDD 2019)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.graph.aggregators import AGGREGATORS, Aggregation
from models.graph.collaborative_graph import CollaborativeGraph, Laplacian, Softmax
from models.graph.recommender import Recommender, Represented, distinct, initialise
from models.graph.sparse import Operands, select
from models.layers.dropout import dropout_mask

_CHUNK_EDGES = {"cpu": 2**12, "cuda": 2**20}
"""Number of edges processed at a time: few enough for a CPU's cache, or enough to keep a GPU busy."""


class KGAT(Recommender):
    """Propagates embeddings along a graph's edges, with attention weights computed from TransR embeddings.

    The graph's nodes are items, then other entities, then users. All computations use the precision of the parameters,
    even under autocast.
    """

    attention: Tensor

    def __init__(
        self,
        graph: CollaborativeGraph,
        num_users: int,
        num_items: int,
        width: int = 64,
        relation_width: int = 64,
        layer_dims: Sequence[int] = (64, 32, 16),
        aggregation: Aggregation = "bi-interaction",
        slope: float = 0.01,
        message_dropout: float = 0.1,
        node_dropout: float = 0.0,
        laplacian: Laplacian = "random-walk",
        softmax: Softmax = "separate",
    ) -> None:
        """Creates the model.

        slope: negative slope of LeakyReLU. message_dropout: dropout probability of each layer's states. node_dropout:
        dropout probability of the propagation matrix's entries. laplacian: Laplacian used before the first `refresh`.
        """
        super().__init__(num_users, num_items, width)
        self.graph = graph
        self.softmax = softmax
        self.message_dropout = message_dropout
        self.node_dropout = node_dropout
        self.entities = nn.Embedding(graph.num_nodes - num_users - num_items, width)
        initialise([self.items, self.entities, self.users])
        self.relations = nn.Embedding(graph.num_relations, relation_width)
        self.projections = nn.Parameter(torch.empty(graph.num_relations, width, relation_width))
        nn.init.xavier_uniform_(self.relations.weight)
        # initialised as one 3-d tensor, as in KGAT's code, so the bound is smaller than for separate matrices
        nn.init.xavier_uniform_(self.projections)
        widths = pairwise((width, *layer_dims))
        self.layers = nn.ModuleList(AGGREGATORS[aggregation](before, after, slope) for before, after in widths)
        self.layer_dims = tuple(layer_dims)
        self.register_buffer("attention", self.projections.new_empty(len(graph.head)))
        self.set_laplacian(laplacian)
        self.register_load_state_dict_post_hook(_propagate_as_loaded)

    @property
    def nodes(self) -> Tensor:
        """Embeddings of all nodes, (num_nodes, width)."""
        return torch.cat([self.items.weight, self.entities.weight, self.users.weight])

    def forward(self, users: Tensor, items: Tensor) -> Represented:
        """Returns representations of users and items.

        Train mode uses the propagation matrix set last, by `refresh` or `set_laplacian`; eval mode computes attention
        from the current weights. The L2 penalty applies to the whole representations.
        """
        rows, place = distinct(torch.cat([users + (self.graph.num_nodes - self.num_users), items]))
        matrix = self.graph.matrix.operands(self.node_dropout) if self.training else self._current_operands()
        of_users, of_items = self._propagate(matrix, rows).index_select(0, place).split([len(users), len(items)])
        return Represented(of_users, of_items, of_users, of_items)

    def represent(self) -> tuple[Tensor, Tensor]:
        """Returns representations of all users and items, with attention computed from the current weights."""
        everything = self._propagate(self._current_operands(), None)
        return everything[-self.num_users :], everything[: self.num_items]

    def _current_operands(self) -> Operands:
        return self.graph.matrix.operands_of(self.graph.merge(self.compute_attention()))

    def _propagate(self, matrix: Operands, rows: Tensor | None) -> Tensor:
        """Concatenates each node's embedding with its normalised states in all layers: (n, width + sum(layer_dims)).

        rows: (n,), node indices, or None for all nodes. The last layer is computed only for these nodes, but its
        dropout mask is drawn for all nodes, which makes a node's mask independent of the batch.
        """
        x = self.nodes
        parts = [select(x, rows)]
        with torch.autocast(x.device.type, enabled=False):
            for layer, out_width in zip(self.layers, self.layer_dims, strict=True):
                mask = self._message_mask(out_width, x)
                if layer is self.layers[-1]:
                    x = layer(matrix, x, rows, mask if mask is None else select(mask, rows))
                    parts.append(F.normalize(x))
                else:
                    x = layer(matrix, x, None, mask)
                    parts.append(F.normalize(select(x, rows)))
        return torch.cat(parts, dim=1)

    def _message_mask(self, width: int, like: Tensor) -> Tensor | None:
        if not self.training or self.message_dropout == 0:
            return None
        return dropout_mask((self.graph.num_nodes, width), self.message_dropout, like)

    def transr(self, head: Tensor, relation: Tensor, tail: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """Returns TransR's ranking losses and L2 penalties of triples with random negative tails, (B,) each.

        The ranking loss is softplus(g(h, r, t) - g(h, r, t')) with g(h, r, t) = |W_r e_h + e_r - W_r e_t|^2 (equations
        1 and 2). The penalty is 1/2 (|W_r e_h|^2 + |e_r|^2 + |W_r e_t|^2 + |W_r e_t'|^2).

        head, relation, tail, negative: (B,) int64.
        """
        ends = self.nodes.index_select(0, torch.stack([head, tail, negative], dim=1).flatten())
        with torch.autocast(ends.device.type, enabled=False):
            projected = self._project(ends.view(len(head), 3, -1), relation)
            of_relation = self.relations(relation)
            of_head, of_tail, of_negative = projected.unbind(1)
            expected = of_head + of_relation
            loss = F.softplus((expected - of_tail).square().sum(1) - (expected - of_negative).square().sum(1))
            return loss, (projected.square().sum((1, 2)) + of_relation.square().sum(1)) / 2

    def set_laplacian(self, kind: Laplacian) -> None:
        """Sets the propagation matrix to a Laplacian until the next `refresh`."""
        self._propagate_by(self.graph.laplacian(kind, self.attention.dtype))

    def refresh(self) -> None:
        """Sets the propagation matrix to the attention computed from the current weights."""
        self._propagate_by(self.compute_attention())

    def _propagate_by(self, values: Tensor) -> None:
        """Stores edge values, (E,), and computes the propagation matrix from them."""
        self.attention.copy_(values)
        self.graph.matrix.set_values(self.graph.merge(values))

    @torch.no_grad()
    def compute_attention(self) -> Tensor:
        """Returns attention, (E,): softmax of (W_r e_t) . tanh(W_r e_h + e_r) over each head's edges (equation 5)."""
        nodes = self.nodes
        logits = torch.empty_like(self.attention)
        with torch.autocast(nodes.device.type, enabled=False):
            for relation, edges in enumerate(self.graph.edges_by_relation()):
                if len(edges) > 0:
                    logits[edges.long()] = self._logits(nodes, relation, edges)
        return self.graph.softmax(logits, self.softmax)

    def _logits(self, nodes: Tensor, relation: int, edges: Tensor) -> Tensor:
        heads, head_of_edge = _compact(self.graph.head.index_select(0, edges), len(nodes))
        tails, tail_of_edge = _compact(self.graph.tail.index_select(0, edges), len(nodes))
        projection = self.projections[relation]
        of_heads = torch.addmm(self.relations.weight[relation], nodes.index_select(0, heads), projection).tanh_()
        of_tails = nodes.index_select(0, tails) @ projection
        size = _CHUNK_EDGES[nodes.device.type]
        products = [
            (of_heads.index_select(0, head) * of_tails.index_select(0, tail)).sum(1)
            for head, tail in zip(head_of_edge.split(size), tail_of_edge.split(size), strict=True)
        ]
        return torch.cat(products)

    def _project(self, x: Tensor, relation: Tensor) -> Tensor:
        """Returns x[i] @ W_relation[i]: (B, n, width) and (B,) -> (B, n, relation_width)."""
        if x.device.type != "cpu":
            return x @ self.projections.index_select(0, relation)
        result: Tensor = _GroupedProjection.apply(x, self.projections, relation)
        return result


def _propagate_as_loaded(model: KGAT, _: Any) -> None:
    model._propagate_by(model.attention)


def _compact(nodes: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns (distinct, place) with distinct[place] == nodes; faster than torch.unique if nodes recur often."""
    occurs = torch.zeros(num_nodes, dtype=torch.bool, device=nodes.device)
    occurs[nodes.long()] = True
    place = occurs.cumsum(0, dtype=torch.int32) - 1
    return occurs.nonzero().squeeze(1), place.index_select(0, nodes)


class _GroupedProjection(torch.autograd.Function):
    """Multiplies the samples of each relation by the relation's matrix, without copying a matrix per sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projections: Tensor, relation: Tensor) -> Tensor:
        order = relation.argsort(stable=True)
        num_rows = torch.bincount(relation, minlength=len(projections)) * x.shape[1]
        ctx.sizes = num_rows.tolist()
        x = x.index_select(0, order)
        ctx.save_for_backward(x, projections, order)
        result = x.new_empty(*x.shape[:2], projections.shape[2])
        for part, projection, here in zip(_rows(x, ctx.sizes), projections, _rows(result, ctx.sizes), strict=True):
            torch.mm(part, projection, out=here)
        return result.index_select(0, order.argsort())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, projections, order = ctx.saved_tensors
        grad = grads[0].index_select(0, order)
        grad_x, grad_projections = torch.empty_like(x), torch.empty_like(projections)
        parts = [_rows(tensor, ctx.sizes) for tensor in (x, grad, grad_x)]
        for part, grad_part, here, projection, of_projection in zip(*parts, projections, grad_projections, strict=True):
            torch.mm(grad_part, projection.T, out=here)
            torch.mm(part.T, grad_part, out=of_projection)
        return grad_x.index_select(0, order.argsort()), grad_projections, None


def _rows(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Flattens x (B, n, d) to B * n rows, and splits the rows into consecutive groups of the given sizes."""
    return x.flatten(0, 1).split(sizes)
