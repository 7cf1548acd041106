"""Mixup: trains on mixtures of two spiral points; epoch and index determine the second point and the mixing weights.

python main.py --task examples/mixup.py:MixedSpirals --epochs 5
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from examples.own_task import SpiralData, Spirals
from lockstep import Batch, KeyedDataset, Objective, SampleKeys, Sums, random_bits, uniform


class Mixed:
    """Data set of mixtures of two samples. Mixtures do not depend on batch size, number of devices or resuming."""

    def __init__(self, data: SpiralData, seed: int) -> None:
        self.data, self.seed = data, seed

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        partner = (random_bits(self.seed, keys.epoch, keys.index, 1)[:, 0] % len(self)).astype(np.int64)
        share = uniform(self.seed, keys.epoch, keys.index, (1,), stream=1)
        own, other = (self.data.__getitems__(replace(keys, index=index)) for index in (keys.index, partner))
        point = (share * own["point"] + (1 - share) * other["point"]).astype(np.float32)
        return {"point": point, "arm": own["arm"], "other_arm": other["arm"], "share": share[:, 0]}


class MixedObjective(Objective):
    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        logits = self.model(batch["point"])
        losses = F.cross_entropy(logits, batch["arm"], reduction="none")
        if self.training:
            others = F.cross_entropy(logits, batch["other_arm"], reduction="none")
            losses = batch["share"] * losses + (1 - batch["share"]) * others
        return {"loss": losses.sum()}


class MixedSpirals(Spirals):
    monitor = ("val/loss", "min")

    def splits(self) -> Mapping[str, KeyedDataset]:
        splits = super().splits()
        return {**splits, "train": Mixed(splits["train"], self.seed)}

    def build_objective(self) -> Objective:
        return MixedObjective(super().build_objective().model)

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {"loss": float(sums["loss"] / sums["weight"])}
