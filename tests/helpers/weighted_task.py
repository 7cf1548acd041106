"""Task with everything that makes exact results hard.

The task has sequences of unequal length, a loss term per time step, augmentation and optional dropout. If the
environment variable LOCKSTEP_RECORD names a folder, each process writes to the folder which samples its forwards
received and when, and how often it evaluated.
"""

import json
import os
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.config import FlagGroup, flag
from trainer.loading.counter_random import normal
from trainer.task import Objective, Task

MAX_LENGTH = 5
NUM_FEATURES = 6
NUM_CLASSES = 3


@dataclass
class WeightedFlags(FlagGroup):
    """Task: sequences"""

    num_train: int = flag(101, "training sequences", at_least=1)
    num_val: int = flag(17, "validation sequences", at_least=1)
    num_test: int = flag(2, "test sequences", at_least=1)
    dropout: float = flag(0.0, "dropout", at_least=0, below=1)
    delay_s: float = flag(0.0, "seconds that every forward sleeps", at_least=0, at_most=60)
    width: int = flag(16, "hidden units", at_least=1)


class Sequences:
    def __init__(self, num: int, seed: int, augment: bool) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, MAX_LENGTH + 1, num)
        self.features = rng.normal(size=(num, MAX_LENGTH, NUM_FEATURES))
        self.labels = (self.features[..., :NUM_CLASSES] + rng.normal(size=(num, MAX_LENGTH, NUM_CLASSES))).argmax(-1)
        self.features[np.arange(MAX_LENGTH) >= self.lengths[:, None]] = 1e3  # padding must not affect results
        self.augment = augment
        self.seed = seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, keys):
        features = self.features[keys.index]
        if self.augment:
            features = features + 0.1 * normal(self.seed, keys.epoch, keys.index, features.shape[1:])
        return {
            "features": features.astype(np.float32),
            "labels": self.labels[keys.index],
            "length": self.lengths[keys.index],
            "epoch": np.full(len(keys.index), keys.epoch),
        }


class Network(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, width, bias=False),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(width, NUM_CLASSES),
        )

    def forward(self, features):
        return self.layers(features)


class WeightedObjective(Objective):
    coupled = True  # samples are not really coupled, but tests count forwards

    def __init__(self, model: nn.Module, delay_s: float) -> None:
        super().__init__(model)
        self.delay_s = delay_s

    def forward(self, batch, phase="train"):
        record(batch, self.training)
        time.sleep(self.delay_s)
        logits = self.model(batch["features"])
        counts = torch.arange(MAX_LENGTH, device=logits.device) < batch["length"][:, None]
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view(counts.shape)
        return {
            "loss": torch.where(counts, losses, 0.0).sum(),
            "hits": ((logits.argmax(-1) == batch["labels"]) & counts).sum(),
            "num_samples": batch["length"].new_full((), len(batch["length"])),
        }


def record(batch, training) -> None:
    folder = os.environ.get("LOCKSTEP_RECORD")
    if folder and not training:
        with open(os.path.join(folder, f"{os.getpid()}.evaluated"), "a") as file:
            file.write(".")
    elif folder:
        counted = batch["weight"] > 0
        line = {"epoch": int(batch["epoch"][0]), "index": batch["index"][counted].tolist(), "time": time.time()}
        # Writes one line per call, so a kill can truncate only the last line.
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


class Weighted(Task):
    Config = WeightedFlags
    monitor = ("val/accuracy", "max")

    @cached_property
    def _splits(self):
        sizes = {"train": self.config.num_train, "val": self.config.num_val, "test": self.config.num_test}
        return {name: Sequences(size, 100 + i, name == "train") for i, (name, size) in enumerate(sizes.items())}

    def splits(self):
        return self._splits

    def collate(self, samples, keys):
        batch = super().collate(samples, keys)
        batch["weight"] = batch["length"].to(torch.float32)
        return batch

    def build_objective(self):
        return WeightedObjective(Network(self.config.width, self.config.dropout), self.config.delay_s)

    def summarise(self, sums):
        return {
            "loss": float(sums["loss"] / sums["weight"]),
            "accuracy": float(sums["hits"] / sums["weight"]),
            "num_samples": float(sums["num_samples"]),
        }
