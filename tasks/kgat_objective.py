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
    """Objective that ranks all items for each user in evaluation."""

    hidden: Tensor

    def __init__(self, model: nn.Module, ks: Sequence[int], hidden: np.ndarray) -> None:
        """Creates the objective. ks: cut-offs of the metrics. hidden: (k,) int64, items excluded from rankings."""
        super().__init__(model)
        self._ks = ks
        self.register_buffer("hidden", torch.tensor(hidden), persistent=False)

    def forward(self, batch: Batch, phase: str = "cf") -> Sums:
        return top_k(self.scores(batch["user"]), batch["positives"], batch["seen"], self._ks)._asdict()

    def scores(self, users: Tensor) -> Tensor:
        """Returns the scores of all items for users (B,): (B, num_items). Hidden items score -inf."""
        raise NotImplementedError


class KgatObjective(RankingObjective):
    """Bayesian personalised ranking (BPR) loss, and for KGAT also the loss of the graph's triples.

    BPR (Rendle et al., UAI 2009) is softplus(score of a random other item - score of an item of the user).
    """

    model: Recommender
    same_masks = True

    def __init__(
        self, model: Recommender, ks: Sequence[int], hidden: np.ndarray, l2: float = 0.0, kg_l2: float = 0.0
    ) -> None:
        """Creates the objective. l2, kg_l2: factors of the L2 penalties on a sample's and a triple's embeddings."""
        super().__init__(model, ks, hidden)
        self._l2, self._kg_l2 = l2, kg_l2
        self.users: Tensor | None
        self.items: Tensor | None
        self.register_buffer("users", None, persistent=False)
        self.register_buffer("items", None, persistent=False)

    def start_evaluation(self) -> None:
        """Computes the propagated embeddings of all users and items."""
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
        """Returns scores in full precision, since many are close. Requires a call of `start_evaluation`."""
        assert self.users is not None and self.items is not None
        with torch.autocast(users.device.type, enabled=False):
            return (self.users[users] @ self.items.T).index_fill_(1, self.hidden, -torch.inf)


class SimpleObjective(RankingObjective):
    """Evaluates a simple recommender, which scores all items from a user's training items."""

    model: SimpleRecommender

    def __init__(self, model: SimpleRecommender, ks: Sequence[int], hidden: np.ndarray, train: ItemLists) -> None:
        super().__init__(model, ks, hidden)
        self._train = train

    def histories(self, users: Tensor) -> dict[str, Tensor]:
        """Returns the model's inputs for users (B,): each user's training items, numbered from 1, and their count."""
        keys = SampleKeys(users.cpu().numpy(), epoch=0)
        items = torch.as_tensor(padded(self._train, keys.index, -1, keys)) + 1
        length = torch.from_numpy(self._train.sizes[keys.index])
        return {"items": items.to(users.device), "length": length.to(users.device)}

    def scores(self, users: Tensor) -> Tensor:
        return self.model(**self.histories(users))[:, 1:].index_fill_(1, self.hidden, -torch.inf)
