"""Tasks that compute with the whole model between epochs, choose the order of samples, or record the progress."""

import os
import signal
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.weighted_task import Network, Sequences, Weighted, WeightedFlags, WeightedObjective
from trainer import flag


@dataclass
class RefreshingFlags(WeightedFlags):
    """Task: sequences, and what each epoch begins with"""

    differs: bool = flag(False, "every rank keeps another value")


class Scaled(nn.Module):
    """Network whose output is scaled by a buffer that the task computes once per epoch."""

    factor = 1.0

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", torch.ones(()))
        self.register_load_state_dict_post_hook(Scaled.scale_as_loaded)

    def scale_as_loaded(self, _):
        self.set_scale(self.scale)

    def set_scale(self, scale):
        self.scale.copy_(scale)
        self.factor = self.scale.item()

    def forward(self, features):
        return self.network(features) * self.factor


class Refreshing(Weighted):
    Config = RefreshingFlags

    def build_objective(self):
        return WeightedObjective(Scaled(Network(self.config.width, 0.0)), 0.0)

    def on_epoch_start(self, objective, epoch, progress):
        assert not torch.is_grad_enabled()
        scale = sum(p.square().mean() for p in progress(list(objective.parameters()), "scale"))
        rank = dist.get_rank() if self.config.differs and dist.is_initialized() else 0
        objective.model.set_scale(1 + scale + epoch + rank)


class Stopped(Refreshing):
    """Task whose buffer depends on its previous value, and which asks rank 0 to stop while the buffer is computed."""

    def on_epoch_start(self, objective, epoch, progress):
        scale = objective.model.scale
        objective.model.set_scale(scale * 0.5 + sum(p.square().mean() for p in objective.parameters()))
        mark = Path(os.environ["LOCKSTEP_MARK"])
        if epoch == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)


class Scored(Weighted):
    """Task that replaces its training data at the start of an epoch, as mining of hard samples does."""

    def on_epoch_start(self, objective, epoch, progress):
        self._splits["train"].scores = np.full(4, epoch)


class Annealed(Weighted):
    """Task that sums the progress given by the keys of its samples."""

    def collate(self, samples, keys):
        batch = super().collate(samples, keys)
        batch["progress"] = torch.full((len(keys.index),), keys.progress, dtype=torch.float64)
        return batch

    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = AnnealedObjective
        return objective

    def summarise(self, sums):
        return super().summarise(sums) | {"progress": float(sums["progress"])}


class AnnealedObjective(WeightedObjective):
    def forward(self, batch, phase="train"):
        return super().forward(batch, phase) | {"progress": (batch["progress"] * (batch["weight"] > 0)).sum()}


class Part(Weighted):
    """Task in which an epoch uses only part of the data."""

    def num_samples(self, phase):
        return 40


class Bucketed(Weighted):
    """Task with batches of unequal size, each of which contains sequences of one length."""

    @cached_property
    def _splits(self):
        return super()._splits | {"train": Sequences(self.config.num_train, 100, True)}

    def order(self, phase, epoch, global_batch_size):
        rng = np.random.default_rng([self.seed, epoch])
        batches = []
        for length in np.unique(self._splits["train"].lengths):
            members = rng.permutation(np.flatnonzero(self._splits["train"].lengths == length))
            batches += np.array_split(members, -(-len(members) // global_batch_size))
        return [batches[i] for i in rng.permutation(len(batches))]
