"""Weighted task whose objective returns a sum only for those domains of which the batch has samples."""

from dataclasses import dataclass

import torch

from tests.helpers.weighted_task import MAX_LENGTH, Weighted, WeightedFlags, WeightedObjective
from trainer.config import flag

DOMAINS = ("cats", "dogs", "birds", "fish", "bees")


@dataclass
class DomainsFlags(WeightedFlags):
    """Task: sequences of several domains"""

    odd_sample: int = flag(-1, "index of the sample whose batches have a histogram with one place more")


class DomainsObjective(WeightedObjective):
    def __init__(self, model, odd_sample):
        super().__init__(model, delay_s=0)
        self.odd_sample = odd_sample

    def forward(self, batch, phase="train"):
        sums = super().forward(batch, phase)
        for k, name in enumerate(DOMAINS):
            num_samples = (batch["index"] % len(DOMAINS) == k).sum()
            if num_samples > 0:
                sums[f"seen_{name}"] = num_samples
        num_places = MAX_LENGTH + 1 + int((batch["index"] == self.odd_sample).any())
        sums["lengths"] = torch.bincount(batch["length"], minlength=num_places)
        return sums


class Domains(Weighted):
    Config = DomainsFlags

    def build_objective(self):
        return DomainsObjective(super().build_objective().model, self.config.odd_sample)

    def summarise(self, sums):
        seen = {name: float(value) for name, value in sorted(sums.items()) if name.startswith("seen_")}
        return super().summarise(sums) | seen | {"long": float(sums["lengths"][-1])}
