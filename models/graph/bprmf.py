"""BPR-MF: matrix factorisation that learns to rank (Rendle et al., UAI 2009)."""

import torch
from torch import Tensor

from models.graph.recommender import Recommender, Represented, initialise


class BPRMF(Recommender):
    """The embeddings themselves."""

    def __init__(self, num_users: int, num_items: int, width: int = 64) -> None:
        super().__init__(num_users, num_items, width)
        initialise([self.users, self.items])

    def forward(self, users: Tensor, items: Tensor) -> Represented:
        of_users, of_items = self.users(users), self.items(items)
        return Represented(of_users, of_items, torch.cat([of_users.unsqueeze(1), of_items], dim=1))

    def represent(self) -> tuple[Tensor, Tensor]:
        return self.users.weight, self.items.weight
