"""Training losses of graph recommenders, and evaluation by ranking all items for each user."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.knowledge_graph.catalogue import ItemLists
from data.knowledge_graph.samples import padded
from models.graph.kgat import KGAT
from models.graph.recommender import Recommender
from models.graph.top_k import top_k
from models.simple.recommenders import SimpleRecommender
from trainer.loading.batches import Batch
from trainer.loading.order import SampleKeys
from trainer.task import Objective, Sums


class RankingObjective(Objective):
    """Evaluates a model by ranking all items for each user."""

    hidden: Tensor

    def __init__(self, model: nn.Module, ks: Sequence[int], hidden: np.ndarray) -> None:
        """Creates the objective. ks: cut-offs k of the metrics. hidden: (n,) int64, items excluded from rankings."""
        super().__init__(model)
        self._ks = ks
        self.register_buffer("hidden", torch.tensor(hidden), persistent=False)

    def forward(self, batch: Batch, phase: str = "cf") -> Sums:
        return top_k(self.scores(batch["user"]), batch["positives"], batch["seen"], self._ks)._asdict()

    def scores(self, users: Tensor) -> Tensor:
        """Returns scores (B, num_items) of all items for users (B,). Items excluded from rankings score -inf."""
        raise NotImplementedError


class KgatObjective(RankingObjective):
    """Computes the "softmax" or "bpr" loss of item scores and, for KGAT, also the loss of graph triples.

    "softmax" is the negative multinomial log-likelihood (Liang et al., WWW 2018): minus the log softmax over all items,
    summed over the items of a user. "bpr" (Rendle et al., UAI 2009) is softplus(s(j) - s(i)) for the scores s(i) of a
    user's item i and s(j) of a random other item j.
    """

    model: Recommender
    same_masks = True

    def __init__(
        self,
        model: Recommender,
        ks: Sequence[int],
        hidden: np.ndarray,
        loss: Literal["softmax", "bpr"],
        l2: float = 0.0,
        kg_l2: float = 0.0,
    ) -> None:
        """Creates the objective. l2: weight of the L2 penalty that each loss term adds for its user and items.

        kg_l2: weight of the L2 penalty that each triple adds for its nodes and relation.
        """
        super().__init__(model, ks, hidden)
        self._loss, self._l2, self._kg_l2 = loss, l2, kg_l2
        self.users: Tensor | None
        self.items: Tensor | None
        self.register_buffer("users", None, persistent=False)
        self.register_buffer("items", None, persistent=False)

    def start_evaluation(self) -> None:
        """Computes the final embeddings of all users and items, once per evaluation."""
        self.users, self.items = self.model.represent()

    def train(self, mode: bool = True) -> "KgatObjective":
        self.users = self.items = None
        super().train(mode)
        return self

    def forward(self, batch: Batch, phase: str = "cf") -> Sums:
        if not self.training:
            return super().forward(batch)
        if phase == "kg":
            return self._rank_triples(batch)
        ranking, squares = self._softmax(batch) if self._loss == "softmax" else self._bpr(batch)
        return {"loss": ranking + self._l2 / 2 * squares, "ranking": ranking}

    def _softmax(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the "softmax" loss of a batch of users, and the sum of squares for the L2 penalty."""
        num_items = self.model.num_items
        found = self.model(batch["user"], torch.arange(num_items, device=batch["user"].device))
        is_real = batch["items"] < num_items
        items = batch["items"].where(is_real, 0)
        log_shares = F.log_softmax(found.users @ found.items.T, dim=1).gather(1, items)
        of_users = found.penalised_users.square().sum(1) * is_real.sum(1)
        of_items = found.penalised_items.square().sum(1)[items] * is_real
        exact = torch.promote_types(log_shares.dtype, torch.float32)
        return -(log_shares * is_real).sum(dtype=exact), of_users.sum() + of_items.sum()

    def _bpr(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the "bpr" loss of (user, item, random item) samples, and the sum of squares for the L2 penalty."""
        found = self.model(batch["user"], torch.cat([batch["positive"], batch["negative"]]))
        positive, negative = ((found.users * items).sum(-1) for items in found.items.chunk(2))
        squares = found.penalised_users.square().sum() + found.penalised_items.square().sum()
        return F.softplus(negative - positive).sum(), squares

    def _rank_triples(self, batch: Batch) -> Sums:
        assert isinstance(self.model, KGAT)
        losses, squares = self.model.transr(batch["head"], batch["relation"], batch["tail"], batch["negative"])
        ranking = losses.sum()
        return {"loss": ranking + self._kg_l2 * squares.sum(), "ranking": ranking}

    def scores(self, users: Tensor) -> Tensor:
        """Returns scores in full precision, since many scores are nearly equal. Call `start_evaluation` first."""
        assert self.users is not None and self.items is not None
        with torch.autocast(users.device.type, enabled=False):
            return (self.users[users] @ self.items.T).index_fill_(1, self.hidden, -torch.inf)


class SimpleObjective(RankingObjective):
    """Evaluates a simple recommender, which computes scores of all items from a user's training items."""

    model: SimpleRecommender

    def __init__(self, model: SimpleRecommender, ks: Sequence[int], hidden: np.ndarray, train: ItemLists) -> None:
        super().__init__(model, ks, hidden)
        self._train = train

    def histories(self, users: Tensor) -> dict[str, Tensor]:
        """Returns the model inputs of users (B,).

        "items": (B, L), training items, numbered from 1 and padded with 0. "length": (B,), number of training items.
        """
        keys = SampleKeys(users.cpu().numpy(), epoch=0)
        items = torch.as_tensor(padded(self._train, keys.index, -1, keys)) + 1
        length = torch.from_numpy(self._train.sizes[keys.index])
        return {"items": items.to(users.device), "length": length.to(users.device)}

    def scores(self, users: Tensor) -> Tensor:
        return self.model(**self.histories(users))[:, 1:].index_fill_(1, self.hidden, -torch.inf)
