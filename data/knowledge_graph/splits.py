"""Holds out items of each user for validation and test."""

from dataclasses import replace

import numpy as np

from data.knowledge_graph.catalogue import Catalogue, ItemLists
from trainer.common.errors import UserError
from trainer.loading.counter_random import random_bits, uniform

VAL_STREAM, TEST_STREAM = 0, 2
"""Streams of the random number generator; each split also uses the next stream."""
_TEST_SHARE = 0.2
"""Share of each user's items for the test, as in the published code of KGCN."""


def hold_out(
    lists: ItemLists, share: float, seed: int, stream: int, times: np.ndarray | None = None
) -> tuple[ItemLists, ItemLists]:
    """Splits lists into kept and held-out items. share: fraction of each user's items to hold out, 0 <= share < 1.

    The held-out items are the latest or, without times (n,), those with the smallest hashes of seed, user and item. A
    fractional number is rounded up with a probability equal to its fractional part. Every user keeps at least one item.
    """
    users, sizes = lists.users, lists.sizes
    words = random_bits(seed, 0, users << 32 | lists.items, 1, stream)[:, 0]
    rounding = uniform(seed, 0, np.arange(len(sizes)), (1,), stream + 1)[:, 0].astype(np.float64)
    num_held_out = np.minimum((share * sizes + rounding).astype(np.int64), sizes - 1)
    order = np.lexsort((words if times is None else -times, users))
    is_held_out = np.empty(len(users), bool)
    is_held_out[order] = np.arange(len(users)) - lists.offsets[users] < num_held_out[users]
    return lists.where(~is_held_out), lists.where(is_held_out)


def hold_out_test(
    lists: ItemLists, seed: int, where: str, times: np.ndarray | None = None
) -> tuple[ItemLists, ItemLists, str]:
    """Splits lists into training and test items, and describes the split. where: name of the data set in messages."""
    train, test = hold_out(lists, _TEST_SHARE, seed, TEST_STREAM, times)
    if not len(test):
        raise UserError(f"{where}: no user has enough items to hold one out for testing; give more data")
    return train, test, f"Test: {'a random' if times is None else 'the latest'} fifth of each user's items."


def with_validation(published: Catalogue, *, val_share: float, seed: int, selects_on_test: bool) -> Catalogue:
    """Adds a validation set to a data set unless it has one. Raises UserError if the validation set is empty.

    val_share, seed, selects_on_test: as for `load_catalogue`.
    """
    train, val = published.train, published.test if selects_on_test else published.val
    if not len(val):
        train, val = hold_out(train, val_share, seed, VAL_STREAM)
    if not len(val):
        raise UserError(f"--val-share {val_share}: leaves no user with an item for validation; choose a larger share")
    names = published.relation_names[: published.num_relations]
    return replace(published, train=train, val=val, relation_names=names)
