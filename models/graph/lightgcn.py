"""Recommenders whose only weights are embeddings: matrix factorisation, and LightGCN (He et al., SIGIR 2020).

LightGCN propagates embeddings over the graph of users and items, and optionally uses a knowledge graph.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from models.graph.recommender import Recommender, Represented, distinct, initialise
from models.graph.sparse import SparseMatrix, product, select
from trainer.common.torch_private import SeesConversions


class BPRMF(Recommender):
    """Matrix factorisation, as in BPR (Rendle et al., UAI 2009)."""

    def __init__(self, num_users: int, num_items: int, width: int = 64) -> None:
        super().__init__(num_users, num_items, width)
        initialise([self.users, self.items])

    def forward(self, users: Tensor, items: Tensor) -> Represented:
        of_users, of_items = self.users(users), self.items(items)
        return Represented(of_users, of_items, of_users, of_items)

    def represent(self) -> tuple[Tensor, Tensor]:
        return self.users.weight, self.items.weight


class LightGCN(Recommender):
    """Averages layers 0 to L, where layer l + 1 is D^-1/2 A D^-1/2 times layer l (equations 3 to 5 and 8).

    Layer 0 contains the embeddings. Nodes are users, then items.
    """

    stays_eager: ClassVar[bool] = True
    """Whether to exclude the model from `torch.compile`, which does not support sparse products."""

    def __init__(
        self, users: Tensor, items: Tensor, num_users: int, num_items: int, width: int = 64, num_layers: int = 3
    ) -> None:
        """Creates the model. users, items: (n,) integers, the user and item of each distinct training interaction."""
        super().__init__(num_users, num_items, width)
        self.num_layers = num_layers
        initialise([self.users, self.items])
        num_nodes = num_users + num_items
        edges = torch.cat([torch.stack([users, items + num_users]), torch.stack([items + num_users, users])], dim=1)
        head, tail = edges[:, (edges[0].long() * num_nodes + edges[1]).argsort()].long()
        degree = torch.bincount(head, minlength=num_nodes).double()
        self.matrix = _ConstantMatrix(head, tail, num_nodes, (degree[head] * degree[tail]).rsqrt())

    def forward(self, users: Tensor, items: Tensor) -> Represented:
        nodes = torch.cat([users, items + self.num_users])
        rows, place = distinct(nodes)
        first, penalised = self.first_layer()
        represented, ego = self._propagate(first, rows).index_select(0, place), penalised.index_select(0, nodes)
        sizes = [len(users), len(items)]
        return Represented(*represented.split(sizes), *ego.split(sizes))

    def represent(self) -> tuple[Tensor, Tensor]:
        everything = self._propagate(self.first_layer()[0], None)
        return everything[: self.num_users], everything[self.num_users :]

    def first_layer(self) -> tuple[Tensor, Tensor]:
        """Returns layer 0 of all nodes, (N, width), and the values to which an L2 penalty applies, (N, *)."""
        ego = torch.cat([self.users.weight, self.items.weight])
        return ego, ego

    def _propagate(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Returns the mean of all layers for the nodes `rows` (None: all nodes), (n, width)."""
        matrix = self.matrix.operands()
        total = select(x, rows)
        for _ in range(self.num_layers - 1):
            x = product(matrix, x)
            total = total + select(x, rows)
        return (total + product(matrix, x, rows)) / (self.num_layers + 1)


class KnowledgeLightGCN(LightGCN):
    """LightGCN that adds to each item's embedding the mean embedding of its neighbours in a knowledge graph.

    Neighbours' embeddings come from a separate table of all entities, including items. Relation types are ignored, but
    a neighbour counts once for each triple that links it to the item.
    """

    def __init__(
        self,
        users: Tensor,
        items: Tensor,
        triples: Tensor,
        num_entities: int,
        num_users: int,
        num_items: int,
        width: int = 64,
        num_layers: int = 3,
    ) -> None:
        """Creates the model. triples: (m, 3), distinct rows (head, relation, tail).

        num_entities: number of entities, including items.
        """
        super().__init__(users, items, num_users, num_items, width, num_layers)
        self.knowledge = nn.Embedding(num_entities, width)
        initialise([self.knowledge])
        head, tail = triples[:, 0].long(), triples[:, 2].long()
        pairs = torch.cat([head * num_entities + tail, tail * num_entities + head])
        pairs, counts = pairs[torch.cat([head, tail]) < num_items].unique(return_counts=True)
        item, neighbour = pairs // num_entities, pairs % num_entities
        degree = torch.bincount(item, counts, minlength=num_items)
        self.mean = _ConstantMatrix(item, neighbour, num_entities, counts / degree[item])

    def first_layer(self) -> tuple[Tensor, Tensor]:
        """Returns layer 0 and, for the L2 penalty, the concatenation of embeddings and mean neighbour embeddings."""
        ego, _ = super().first_layer()
        means = product(self.mean.operands(), self.knowledge.weight)[: self.num_items]
        of_users = means.new_zeros(self.num_users, means.shape[1])
        said = torch.cat([of_users, means])
        return ego + said, torch.cat([ego, said], dim=1)


class _ConstantMatrix(SeesConversions, SparseMatrix):
    """Sparse matrix that keeps its float64 values, and rounds them again whenever the model's dtype changes."""

    def __init__(self, rows: Tensor, columns: Tensor, size: int, values: Tensor) -> None:
        """Creates the matrix. values: (entries,) float64. The other arguments are passed to `SparseMatrix`."""
        super().__init__(rows, columns, size, torch.get_default_dtype())
        self._exact = values
        self.set_values(values)

    def after_conversion(self) -> None:
        self.set_values(self._exact.to(self.values.device))
