"""Loss and evaluation of tabular models, on synthetic tables or on a user's table."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.tabular.lora import merged
from trainer.common.errors import UserError
from trainer.loading.batches import Batch
from trainer.task import Objective, Outputs, PerSample

_PROBLEMS_AT_ONCE = 32
"""Maximum number of classification problems per model call in evaluation, for any batch size."""

_DECIMALS = 6
"""Decimal places to which probabilities are rounded, so that equal rows in different batches are tied."""

_TIE = 1e-6
"""Tolerance for ties: equal rows have equal scores except for rounding."""

Answer = Callable[[nn.Module, Tensor, int], Tensor]
"""Maps (model, rows (B, m), number of context rows) to class probabilities, (B, C)."""


class TabularObjective(Objective):
    """Computes the cross-entropy of query rows, and the sums from which other metrics are computed."""

    def __init__(self, model: nn.Module, answer: Answer | None) -> None:
        """answer: function that predicts class probabilities of a user's rows; None for synthetic tables."""
        super().__init__(model)
        self._answer = answer
        self._cuts_evaluation = True
        self._merged: list[nn.Module] = []  # a list hides the module from PyTorch, so that it is not a submodule

    def call_equally(self) -> None:
        """Disables splitting evaluation batches into several model calls. Raises UserError for a user's table."""
        if self._answer is not None:
            raise UserError(
                "--multi-gpu fsdp: all processes must call the model equally often, but with --data-dir the number of "
                "calls can differ; use --multi-gpu ddp"
            )
        self._cuts_evaluation = False

    def start_evaluation(self) -> None:
        """Merges low-rank adapters into the weights, once per evaluation."""
        self._merged = [merged(self.model)]

    def train(self, mode: bool = True) -> "TabularObjective":
        if mode:
            self._merged = []
        return super().train(mode)

    def probabilities(self, batch: Batch) -> Tensor:
        """Returns class probabilities (B, C) of a user's rows. Call `start_evaluation` first."""
        assert self._answer is not None
        return self._answer(self._merged[0], batch["row"], int(batch["num_context"][0]))

    def forward(self, batch: Batch, phase: str = "train") -> Outputs:
        if "row" in batch:
            return self._score_rows(batch)
        if self.training:
            return self._learn(batch)
        parts = _parts(batch, _PROBLEMS_AT_ONCE) if self._cuts_evaluation else [batch]
        sums = [self._score_problems(part) for part in parts]
        return {name: torch.stack([part[name] for part in sums]).sum(0) for name in sums[0]}

    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        return _fit_of(self._logits(batch), batch["targets"])

    def _score_problems(self, batch: Batch) -> dict[str, Tensor]:
        logits, targets = self._logits(batch), batch["targets"]
        areas = area_under_curve(logits.softmax(2), targets)
        return _fit_of(logits, targets) | {"area": areas.nansum(), "tables": areas.isfinite().sum()}

    def _logits(self, batch: Batch) -> Tensor:
        counts = (batch.get(name) for name in ("num_context", "num_features", "num_classes"))
        found: Tensor = self.model(batch["context"], batch["labels"], batch["queries"], *counts)
        return found

    def _score_rows(self, batch: Batch) -> Outputs:
        probabilities = self.probabilities(batch)
        of_label = probabilities.gather(1, batch["label"].unsqueeze(1))
        return {
            "loss": -of_label.clamp(min=1e-15).log().sum(),
            "probabilities": PerSample(probabilities.round(decimals=_DECIMALS)),
            "label": PerSample(batch["label"]),
        }


def with_all_counts(batch: Batch, max_classes: int) -> Batch:
    """Adds the counts of valid rows, columns and classes that a batch of unpadded classification problems lacks."""
    num_problems, num_rows, num_columns = batch["context"].shape
    sizes = {"num_context": num_rows, "num_features": num_columns, "num_classes": max_classes}
    counts = {
        name: batch[name] if name in batch else batch["labels"].new_full((num_problems,), size)
        for name, size in sizes.items()
    }
    return {name: batch[name] for name in ("context", "labels", "queries")} | counts


def _fit_of(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Sums loss and correct predictions over queries. logits: (B, Q, C). targets: (B, Q), -1 for ignored queries."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return {"loss": loss, "correct": (logits.argmax(2) == targets).sum()}


def _parts(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, len(batch["targets"]), size):
        yield {name: tensor[start : start + size] for name, tensor in batch.items()}


def area_under_curve(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the one-vs-rest area under the ROC curve of each problem, averaged over classes: (B,) float64.

    A class's area is the share of pairs (row of the class, other row) in which the first row has the higher score; ties
    (differences up to 1e-6) count half. Classes that contain no row or all rows are ignored; if no class remains, the
    result is NaN.

    scores: (B, Q, C), for example probabilities. targets: (B, Q) int64, -1 for ignored rows.
    """
    areas, num_counted = scores.new_zeros(2, len(scores), dtype=torch.float64)
    for c in range(scores.shape[2]):
        positive, negative = (targets == c).double(), ((targets != c) & (targets >= 0)).double()
        of_class = scores[:, :, c]
        above = of_class.unsqueeze(2) - of_class.unsqueeze(1)
        won = (above > _TIE).double() + (above.abs() <= _TIE).double() / 2
        wins = torch.einsum("bi,bij,bj->b", positive, won, negative)
        num_pairs = positive.sum(1) * negative.sum(1)
        areas += torch.where(num_pairs > 0, wins / num_pairs, 0.0)
        num_counted += num_pairs > 0
    return areas / num_counted
