"""Training losses of graph recommenders, and evaluation by ranking all items for each user."""

from collections.abc import Sequence

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
        """Creates the objective. ks: values of k in metrics @k. hidden: (n,) int64, items excluded from rankings."""
        super().__init__(model)
        self._ks = ks
        self.register_buffer("hidden", torch.tensor(hidden), persistent=False)

    def forward(self, batch: Batch, phase: str = "cf") -> Sums:
        return top_k(self.scores(batch["user"]), batch["positives"], batch["seen"], self._ks)._asdict()

    def scores(self, users: Tensor) -> Tensor:
        """Returns scores (B, num_items) of all items for users (B,). Items excluded from rankings score -inf."""
        raise NotImplementedError


class KgatObjective(RankingObjective):
    """Computes the Bayesian personalised ranking (BPR) loss and, for KGAT, also the loss of graph triples.

    BPR (Rendle et al., UAI 2009) is softplus(s(j) - s(i)) for scores s of a user's item i and a random other item j.
    """

    model: Recommender
    same_masks = True

    def __init__(
        self, model: Recommender, ks: Sequence[int], hidden: np.ndarray, l2: float = 0.0, kg_l2: float = 0.0
    ) -> None:
        """Creates the objective. l2, kg_l2: weights of the L2 penalties on embeddings of BPR samples and of triples."""
        super().__init__(model, ks, hidden)
        self._l2, self._kg_l2 = l2, kg_l2
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
        found = self.model(batch["user"], torch.stack([batch["positive"], batch["negative"]], dim=1))
        positive, negative = (found.users.unsqueeze(1) * found.items).sum(-1).unbind(1)
        ranking = F.softplus(negative - positive).sum()
        return {"loss": ranking + self._l2 / 2 * found.penalised.square().sum(), "ranking": ranking}

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
        """Returns model inputs for users (B,): "items" (B, L), their training items from 1, 0-padded; "length" (B,)."""
        keys = SampleKeys(users.cpu().numpy(), epoch=0)
        items = torch.as_tensor(padded(self._train, keys.index, -1, keys)) + 1
        length = torch.from_numpy(self._train.sizes[keys.index])
        return {"items": items.to(users.device), "length": length.to(users.device)}

    def scores(self, users: Tensor) -> Tensor:
        return self.model(**self.histories(users))[:, 1:].index_fill_(1, self.hidden, -torch.inf)
