"""Holds out items of each user by a function of (seed, user, item), independent of file order."""

from dataclasses import dataclass

import numpy as np

from data.knowledge_graph.catalogue import Catalogue, ItemLists
from trainer.common.errors import UserError
from trainer.loading.counter_random import random_bits, uniform

VAL_STREAM, TEST_STREAM = 0, 2
"""Each uses two streams of the counter-based generator."""


def hold_out(
    lists: ItemLists, share: float, seed: int, stream: int, times: np.ndarray | None = None
) -> tuple[ItemLists, ItemLists]:
    """Splits the lists into the kept items and a held-out share of each user's, 0 <= share < 1.

    Holds out the items with the smallest hashes or, given the items' times (n,), the latest. A fraction of an item is
    rounded up with its probability, so that users with few items contribute their share; every user keeps one item.
    """
    users, sizes = lists.users, lists.sizes
    words = random_bits(seed, 0, users << 32 | lists.items, 1, stream)[:, 0]
    rounding = uniform(seed, 0, np.arange(len(sizes)), (1,), stream + 1)[:, 0].astype(np.float64)
    num_held_out = np.minimum((share * sizes + rounding).astype(np.int64), sizes - 1)
    order = np.lexsort((words if times is None else -times, users))
    is_held_out = np.empty(len(users), bool)
    is_held_out[order] = np.arange(len(users)) - lists.offsets[users] < num_held_out[users]
    return lists.where(~is_held_out), lists.where(is_held_out)


@dataclass(frozen=True)
class Published:
    """A data set as published, before holding out a validation set.

    valid: its own validation items, or None. triples: as in `Catalogue`, or None without a graph. relation_names: at
    least one per relation, or none. unknown_items, notes, names: as in `Catalogue`.
    """

    num_users: int
    num_items: int
    train: ItemLists
    valid: ItemLists | None
    test: ItemLists
    triples: np.ndarray | None
    relation_names: tuple[str, ...]
    unknown_items: np.ndarray
    notes: tuple[str, ...] = ()
    names: tuple[tuple[str, ...], ...] = ((), (), ())

    def catalogue(self, *, val_share: float, seed: int, selects_on_test: bool) -> Catalogue:
        """Builds the catalogue with a validation set; arguments as for `load_catalogue`. Raises UserError if that set
        is empty.
        """
        if selects_on_test:
            train, val = self.train, self.test
        elif self.valid is not None:
            train, val = self.train, self.valid
        else:
            train, val = hold_out(self.train, val_share, seed, VAL_STREAM)
        if not len(val):
            raise UserError(f"--val-share {val_share}: leaves nobody an item to validate on; choose a larger share")
        triples = np.empty((0, 3), np.int32) if self.triples is None else self.triples
        num_relations = int(triples[:, 1].max(initial=-1)) + 1
        return Catalogue(
            self.num_users,
            self.num_items,
            max(self.num_items, int(triples[:, [0, 2]].max(initial=-1)) + 1),
            num_relations,
            train,
            val,
            self.test,
            triples,
            self.triples is not None,
            self.relation_names[:num_relations],
            self.unknown_items,
            self.notes,
            self.names,
        )
