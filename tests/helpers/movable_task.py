"""Weighted task with data sets that can be moved to a GPU, with unequal sample weights and random augmentation."""

import copy

import numpy as np

from tests.helpers.weighted_task import Sequences, Weighted
from trainer import Movable, uniform
from trainer.loading.arrays import cast, rows


class MovableSequences(Sequences, Movable):
    rows_alike = True
    stays = frozenset({"terms"})

    @classmethod
    def of(cls, dataset):
        own = copy.copy(dataset)
        own.__class__ = cls
        own.terms = own.lengths
        own.features = own.features.astype(np.float32)
        return own

    def __getitems__(self, keys):
        index = self.here(keys.index)
        features = rows(self.features, index)
        if self.augment:
            features = features + (uniform(self.seed, keys.epoch, index, features.shape[1:]) - 0.5) / 4
        lengths = rows(self.lengths, index)
        epochs = cast(0 * lengths + keys.epoch, "int64")
        return {"features": features, "labels": rows(self.labels, index), "length": lengths, "epoch": epochs}

    def weights(self, keys):
        return self.terms[keys.index].astype(np.float32)


class WrongSequences(MovableSequences):
    def weights(self, keys):
        return super().weights(keys) + 1


class MovableWeighted(Weighted):
    kind = MovableSequences

    def splits(self):
        return {name: self.kind.of(dataset) for name, dataset in super().splits().items()}


class WrongWeights(MovableWeighted):
    kind = WrongSequences


class HalfMovable(MovableWeighted):
    def splits(self):
        return super().splits() | {"val": Weighted.splits(self)["val"]}
