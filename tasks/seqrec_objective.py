"""Training losses of sequential recommenders, and evaluation by the rank of the true next item."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from models.layers.item_scores import highest
from models.sequential.ranking import (
    binary_cross_entropy,
    full_softmax,
    generalised_binary_cross_entropy,
    place_of_target,
    ranking_metrics,
    sampled_softmax,
    times_recommended,
)
from models.sequential.sasrec import SequentialRecommender
from models.simple.recommenders import SimpleRecommender
from trainer.loading.batches import Batch
from trainer.task import Objective, Sums

Loss = Literal["ce", "bce", "sampled", "gbce"]

_LENGTHS_PER_BATCH = 4
"""Number of smaller batches into which a training batch on a CPU is split by length, to reduce padding."""


class SeqrecObjective(Objective):
    """Trains a model to predict the next item at each position of a history; evaluates the held-out item's rank."""

    model: SequentialRecommender | SimpleRecommender

    def __init__(
        self,
        model: SequentialRecommender | SimpleRecommender,
        ks: Sequence[int],
        loss: Loss = "ce",
        calibration: float = 0.0,
        l2: float = 0.0,
    ) -> None:
        """ks: cut-offs of the ranking metrics. calibration: parameter t of "gbce". l2: weight of the L2 penalty."""
        super().__init__(model)
        self._ks, self._kind, self._calibration, self.l2 = ks, loss, calibration, l2
        self._cuts_by_length = True

    def call_equally(self) -> None:
        """Disables splitting batches by length, so that each batch takes a single model call."""
        self._cuts_by_length = False

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        if not self.training:
            return self._places(batch)
        parts = by_length(batch) if self._cuts_by_length else [batch]
        loss = torch.stack([self._loss(part) for part in parts]).sum()
        if self.l2 > 0:
            assert isinstance(self.model, SequentialRecommender)
            penalty = torch.stack([table.square().sum() for table in self.model.embedding_tables()]).sum()
            loss = loss + self.l2 / 2 * penalty * batch["weight"].sum()
        return {"loss": loss}

    def _loss(self, batch: Batch) -> Tensor:
        assert isinstance(self.model, SequentialRecommender)
        states = self.model.encode(batch["items"], batch["length"], batch.get("times"))
        targets, table = batch["targets"], self.model.items.weight
        if self._kind == "ce":
            return full_softmax(states, targets, table)
        negatives = batch["negatives"]
        if self._kind == "bce":
            return binary_cross_entropy(states, targets, negatives, table)
        if self._kind == "sampled":
            return sampled_softmax(states, targets, negatives, table)
        return generalised_binary_cross_entropy(states, targets, negatives, table, self._calibration)

    def _scores(self, batch: Batch) -> Tensor:
        """Returns next-item scores (B, num_items + 1); column 0, the padding item, is -inf."""
        scores: Tensor = self.model(batch["items"], batch["length"], batch.get("times"))
        return scores

    def recommend(self, batch: Batch, num_items: int) -> tuple[Tensor, Tensor]:
        """Returns the num_items highest scores and their items, (B, num_items) each; "seen" items score -inf."""
        return highest(without_seen(self._scores(batch), batch), num_items)

    def _places(self, batch: Batch) -> Sums:
        """Sums metrics of the true item's rank among all and among random items; counts recommendations per item."""
        scores = self._scores(batch)
        target = batch["target"].unsqueeze(1)
        of_target = scores.gather(1, target).squeeze(1)
        sampled = place_of_target(of_target, scores.gather(1, batch["candidates"]))
        recommended = times_recommended(without_seen(scores, batch), self._ks)
        full = place_of_target(of_target, scores.scatter_(1, target, -torch.inf))
        return {
            "full": ranking_metrics(full, self._ks),
            "sampled": ranking_metrics(sampled, self._ks),
            "recommended": recommended,
        }


def without_seen(scores: Tensor, batch: Batch) -> Tensor:
    """Sets the scores of the batch's "seen" items to -inf in place, and returns scores, (B, num_items + 1)."""
    return scores.scatter_(1, batch["seen"], -torch.inf) if "seen" in batch else scores


def by_length(batch: Batch) -> Iterator[Batch]:
    """Splits a training batch into smaller batches of similar history lengths, which need less padding.

    Splits only on a CPU, where padding costs time. On a GPU, reading the lengths would force a synchronisation, and
    smaller kernels would not be faster.
    """
    length = batch["length"]
    if length.device.type != "cpu" or len(length) < 2 * _LENGTHS_PER_BATCH or not _has_much_padding(batch):
        yield batch
        return
    for part in length.argsort(stable=True).chunk(_LENGTHS_PER_BATCH):
        longest = int(length[part[-1]])
        rows = {name: tensor.index_select(0, part) for name, tensor in batch.items()}
        for name in ("items", "targets", "times"):
            if name in rows:
                rows[name] = rows[name][:, :longest]
        if rows.get("negatives", length).dim() == 3:  # negatives per position
            rows["negatives"] = rows["negatives"][:, :longest]
        yield rows


def _has_much_padding(batch: Batch) -> bool:
    return int(batch["length"].sum()) < 0.9 * batch["items"].numel()
