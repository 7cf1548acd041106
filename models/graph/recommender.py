"""What all models share that score a user's items by dot products."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Represented(NamedTuple):
    """Users and n items of each; a user's score of an item is the dot product of the two."""

    users: Tensor
    """(B, D)."""
    items: Tensor
    """(B, n, D)."""
    penalised: Tensor
    """(B, 1 + n, *): what an L2 penalty squares, of the user and then of its items."""


class Recommender(nn.Module):
    """Embeddings of users and items, and what a model makes of them.

    Users count from 0 to num_users - 1, items from 0 to num_items - 1.
    """

    def __init__(self, num_users: int, num_items: int, width: int) -> None:
        super().__init__()
        self.num_users = num_users
        self.num_items = num_items
        self.users = nn.Embedding(num_users, width)
        self.items = nn.Embedding(num_items, width)

    def forward(self, users: Tensor, items: Tensor) -> Represented:
        """users: (B,) int64. items: (B, n) int64."""
        raise NotImplementedError

    def represent(self) -> tuple[Tensor, Tensor]:
        """All users and all items, to be ranked: (num_users, D) and (num_items, D)."""
        raise NotImplementedError


class FinalScores(nn.Module):
    """The scores of all items for some users, from what a recommender has made of both."""

    users: Tensor
    items: Tensor
    hidden: Tensor

    def __init__(self, users: Tensor, items: Tensor, hidden: Tensor) -> None:
        """users: (num_users, D), items: (num_items, D), as `Recommender.represent` returns them.

        hidden: (k,) int64, items whose score is -inf for everybody.
        """
        super().__init__()
        self.register_buffer("hidden", hidden.detach().clone())
        self.register_buffer("users", users.detach().clone())
        self.register_buffer("items", items.detach().clone())

    def forward(self, users: Tensor) -> Tensor:
        """users: (B,) int64. Returns (B, num_items)."""
        return (self.users[users] @ self.items.T).index_fill(1, self.hidden, -torch.inf)


def initialise(tables: list[nn.Embedding]) -> None:
    """Uniform within Xavier's bound of the one table that these would be together."""
    num_rows, width = sum(table.num_embeddings for table in tables), tables[0].embedding_dim
    bound = (6 / (num_rows + width)) ** 0.5
    for table in tables:
        nn.init.uniform_(table.weight, -bound, bound)


def distinct(nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, place) with rows[place] == nodes, flat; without repetition on a CPU, where each row costs time.

    A GPU would wait for the number of distinct ones.
    """
    if nodes.device.type == "cpu":
        return nodes.flatten().unique(return_inverse=True)
    return nodes.flatten(), torch.arange(nodes.numel(), device=nodes.device)
