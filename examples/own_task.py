"""Custom task, in a single file, that predicts the spiral arm of a point.

python main.py --task examples/own_task.py:Spirals --epochs 5 --hidden-units 64
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Batch, FlagGroup, Objective, SampleKeys, Sums, Task, flag

NUM_ARMS = 3


@dataclass
class SpiralFlags(FlagGroup):
    """Task: spirals"""

    num_points: int = flag(3000, "number of training points", at_least=1)
    noise: float = flag(0.1, "standard deviation of the points around their arm", at_least=0)
    hidden_units: int = flag(64, "width of each hidden layer", at_least=1)


class SpiralData:
    """Data set in memory: points, (n, 2) float32, and arms, (n,) int64."""

    def __init__(self, num_points: int, noise: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.arms = rng.integers(NUM_ARMS, size=num_points)
        radius = rng.uniform(0.2, 2.0, num_points)
        angle = 3 * radius + 2 * math.pi * self.arms / NUM_ARMS
        points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        self.points = (points + noise * rng.normal(size=points.shape)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.arms)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        return {"point": self.points[keys.index], "arm": self.arms[keys.index]}


class SpiralObjective(Objective):
    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        logits = self.model(batch["point"])
        loss = F.cross_entropy(logits, batch["arm"], reduction="sum")
        return {"loss": loss, "correct": (logits.argmax(dim=1) == batch["arm"]).sum()}


class Spirals(Task):
    Config = SpiralFlags
    monitor = ("val/accuracy", "max")

    def splits(self) -> Mapping[str, SpiralData]:
        return self._splits

    @cached_property
    def _splits(self) -> Mapping[str, SpiralData]:
        sizes = {"train": self.config.num_points, "val": 500, "test": 500}
        return {
            name: SpiralData(size, self.config.noise, self.seed + i) for i, (name, size) in enumerate(sizes.items())
        }

    def build_objective(self) -> Objective:
        hidden = self.config.hidden_units
        model = nn.Sequential(
            nn.Linear(2, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, NUM_ARMS)
        )
        return SpiralObjective(model)

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {name: float(sums[key] / sums["weight"]) for name, key in (("loss", "loss"), ("accuracy", "correct"))}
