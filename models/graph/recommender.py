"""Base class and helpers of recommenders that score items by dot products of embeddings."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Represented(NamedTuple):
    """Representations of B users and n items; the score of an item for a user is their dot product."""

    users: Tensor
    """(B, D), representations of users."""
    items: Tensor
    """(n, D), representations of items."""
    penalised_users: Tensor
    """(B, *), values of each user to which an L2 penalty applies."""
    penalised_items: Tensor
    """(n, *), values of each item to which an L2 penalty applies."""


class Recommender(nn.Module):
    """Base class of recommenders with embeddings of users and items.

    Users are numbered from 0 to num_users - 1, items from 0 to num_items - 1.
    """

    def __init__(self, num_users: int, num_items: int, width: int) -> None:
        super().__init__()
        self.num_users = num_users
        self.num_items = num_items
        self.users = nn.Embedding(num_users, width)
        self.items = nn.Embedding(num_items, width)

    def forward(self, users: Tensor, items: Tensor) -> Represented:
        """Returns representations of users (B,) int64 and items (n,) int64, which may repeat."""
        raise NotImplementedError

    def represent(self) -> tuple[Tensor, Tensor]:
        """Returns representations of all users, (num_users, D), and all items, (num_items, D)."""
        raise NotImplementedError


class FinalScores(nn.Module):
    """Scores all items for given users from fixed representations."""

    users: Tensor
    items: Tensor
    hidden: Tensor

    def __init__(self, users: Tensor, items: Tensor, hidden: Tensor) -> None:
        """Creates the module. users, items: results of `Recommender.represent`.

        hidden: (n,) int64, items whose score is -inf for all users.
        """
        super().__init__()
        self.register_buffer("hidden", hidden.detach().clone())
        self.register_buffer("users", users.detach().clone())
        self.register_buffer("items", items.detach().clone())

    def forward(self, users: Tensor) -> Tensor:
        """Returns scores (B, num_items) for users (B,) int64."""
        return (self.users[users] @ self.items.T).index_fill(1, self.hidden, -torch.inf)


def initialise(tables: list[nn.Embedding]) -> None:
    """Initialises embedding tables with Xavier uniform values, whose bound is computed as if the tables were one."""
    num_rows, width = sum(table.num_embeddings for table in tables), tables[0].embedding_dim
    bound = (6 / (num_rows + width)) ** 0.5
    for table in tables:
        nn.init.uniform_(table.weight, -bound, bound)


def distinct(nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (rows, place) with rows[place] == nodes.flatten(). On a CPU, rows are distinct, to save time.

    On a GPU, rows may repeat, because finding the distinct nodes would make the CPU wait for the GPU.
    """
    if nodes.device.type == "cpu":
        return nodes.unique(return_inverse=True)
    return nodes, torch.arange(len(nodes), device=nodes.device)
