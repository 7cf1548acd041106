"""LightGCN: propagation over the graph of users and items without weights (He et al., SIGIR 2020)."""

import torch
from torch import Tensor

from models.graph.recommender import Recommender, Represented, distinct, initialise
from models.graph.sparse import SparseMatrix, product, select


class LightGCN(Recommender):
    """The mean of the layers 0 to L, where layer l + 1 is D^-1/2 A D^-1/2 times layer l (equations 3 to 5 and 8).

    Nodes of the graph: users, then items.
    """

    def __init__(self, users: Tensor, items: Tensor, num_users: int, num_items: int, width: int = 64, layers: int = 3):
        """users, items: (n,) integers, the distinct interactions to train on."""
        super().__init__(num_users, num_items, width)
        self.num_layers = layers
        initialise([self.users, self.items])
        num_nodes = num_users + num_items
        edges = torch.cat([torch.stack([users, items + num_users]), torch.stack([items + num_users, users])], dim=1)
        head, tail = edges[:, (edges[0].long() * num_nodes + edges[1]).argsort()].long()
        degree = torch.bincount(head, minlength=num_nodes).to(self.users.weight.dtype)
        self.matrix = SparseMatrix(head, tail, num_nodes, degree.dtype)
        self.matrix.set_values((degree[head] * degree[tail]).rsqrt())

    def forward(self, users: Tensor, items: Tensor) -> Represented:
        nodes = torch.cat([users.unsqueeze(1), items + self.num_users], dim=1)
        rows, place = distinct(nodes)
        embeddings = torch.cat([self.users.weight, self.items.weight])
        represented = self._propagate(embeddings, rows).index_select(0, place).view(*nodes.shape, -1)
        ego = embeddings.index_select(0, nodes.flatten()).view(*nodes.shape, -1)
        return Represented(represented[:, 0], represented[:, 1:], ego)

    def represent(self) -> tuple[Tensor, Tensor]:
        everything = self._propagate(torch.cat([self.users.weight, self.items.weight]), None)
        return everything[: self.num_users], everything[self.num_users :]

    def _propagate(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """The mean of all layers for some nodes, (n, width), or for all; the last layer is made for those alone."""
        matrix = self.matrix.operands()
        total = select(x, rows)
        for _ in range(self.num_layers - 1):
            x = product(matrix, x)
            total = total + select(x, rows)
        return (total + product(matrix, x, rows)) / (self.num_layers + 1)
