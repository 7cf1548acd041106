"""Task whose metrics need the outputs of all samples: it classifies whether points lie above a plane.

If the environment variable LOCKSTEP_RECORD names a folder, each process that summarises an evaluation, or draws
pictures of an evaluation, writes a file to this folder.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer import FlagGroup, Objective, PerSample, Task, flag

NUM_FEATURES = 4


@dataclass
class ScoredFlags(FlagGroup):
    """Task: points above a plane"""

    num_test: int = flag(7, "test points", at_least=2)


class Points:
    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.points = rng.normal(size=(num, NUM_FEATURES)).round(1).astype(np.float32)
        self.labels = (self.points.sum(1) + rng.normal(size=num) > 0).astype(np.int64)
        self.labels[:2] = 0, 1

    def __len__(self) -> int:
        return len(self.points)

    def __getitems__(self, keys):
        return {"point": self.points[keys.index], "label": self.labels[keys.index]}


class ScoredObjective(Objective):
    def score(self, points):
        return self.model(points)

    def forward(self, batch, phase="train"):
        logits = self.score(batch["point"])
        loss = F.binary_cross_entropy_with_logits(logits[:, 0], batch["label"].to(logits.dtype), reduction="sum")
        if self.training:
            return {"loss": loss}
        return {
            "loss": loss,
            "logits": PerSample(logits),
            "score": PerSample(logits[:, 0]),
            "label": PerSample(batch["label"]),
            "index": PerSample(batch["index"]),
        }


class MeanScore(ScoredObjective):
    def score(self, points):
        return torch.stack([model(points) for model in self.model]).mean(0)


class Scored(Task):
    Config = ScoredFlags
    monitor = ("val/auc", "max")

    @cached_property
    def _splits(self):
        sizes = {"train": 25, "val": 11, "test": self.config.num_test}
        return {name: Points(size, i) for i, (name, size) in enumerate(sizes.items())}

    def splits(self):
        return self._splits

    def build_objective(self):
        return ScoredObjective(nn.Linear(NUM_FEATURES, 2))

    def ensemble(self, objectives):
        return MeanScore(nn.ModuleList([objective.model for objective in objectives]))

    def summarise(self, sums):
        metrics = {"loss": float(sums["loss"] / sums["weight"])}
        if "score" not in sums:
            return metrics
        record("summarised")
        assert torch.equal(sums["index"], torch.arange(int(sums["weight"])))
        assert torch.equal(sums["logits"][:, 0], sums["score"])
        return metrics | {"auc": area_under_curve(sums["score"], sums["label"])}

    def details(self, sums):
        return {"scores": sums["score"].tolist()}

    def pictures(self, sums):
        record("drawn")
        return {"labels": np.zeros((1, len(sums["label"]), 3), np.uint8)}


def record(what: str) -> None:
    folder = os.environ.get("LOCKSTEP_RECORD")
    if folder:
        (Path(folder) / f"{what}-{os.getpid()}").touch()


def area_under_curve(scores, labels) -> float:
    """Returns the share of (positive, negative) pairs in which the positive scores higher; ties count half."""
    above = scores[labels == 1][:, None] - scores[labels == 0]
    return int(2 * (above > 0).sum() + (above == 0).sum()) / (2 * above.numel())
