"""Data sets of a recommender: interactions, triples of the graph, and users for whom items are ranked.

Random draws depend on seed, epoch and sample index, but not on the batch. Negatives are drawn uniformly, without
rejection (see `ItemSets`).
"""

from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from data.interactions.item_sets import ItemSets
from data.knowledge_graph.catalogue import Catalogue, ItemLists
from data.knowledge_graph.edges import Edges
from trainer.common.errors import UserError
from trainer.loading.arrays import Array, Ragged, cast, namespace, on_host
from trainer.loading.counter_random import below, random_bits
from trainer.loading.on_device import Movable
from trainer.loading.order import SampleKeys

_USER_STREAM, _ITEM_STREAM, _HEAD_STREAM, _TAIL_STREAM = range(4, 8)
"""Streams of the random number generator; splits.py uses streams 0 to 3."""
_STEP = 128
"""Multiple to which item lists are padded on a GPU."""


class BprSamples(Movable):
    """Data set of triples (user, item of the user, random other item); it has one sample per training interaction."""

    rows_alike = True

    def __init__(self, catalogue: Catalogue, seed: int, draw: Literal["users", "interactions"] = "users") -> None:
        """Creates the data set. With `draw` "interactions", sample i is interaction i.

        With "users", the samples of an epoch go through the users repeatedly, each time in a new random order. A sample
        draws its positive uniformly from its user's items, as in the published code of KGAT.

        Raises UserError if a user has all items.
        """
        train = catalogue.train
        self._items = train.items
        self._seed = seed
        self._users_of_samples = train.users if draw == "interactions" else None
        self._users = np.flatnonzero(train.sizes)
        self._sets = ItemSets.of_sorted(train.offsets, train.items + 1, catalogue.num_items)
        without_negative = np.flatnonzero(self._sets.num_others(self._users) == 0)
        if len(without_negative):
            raise UserError(
                f"--data-dir: user {self._users[without_negative[0]]} has all {catalogue.num_items} items in "
                "training, so no item is left as a negative; give data with more items, or remove this user"
            )

    def __len__(self) -> int:
        return len(self._items)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns {"user", "positive", "negative"}, (B,) int64 each."""
        index = self.here(keys.index)
        bits = random_bits(self._seed, keys.epoch, index, 2, _ITEM_STREAM)
        if self._users_of_samples is not None:
            users, position = self._users_of_samples.take(index), index
        else:
            turns = _turns(self._seed, keys.epoch, len(self._users), len(self), _USER_STREAM, self.device)
            users = self._users.take(cast(turns.take(index), "int64"))
            position = self._sets.offsets.take(users) + below(bits[:, :1], self._sets.sizes(users))[:, 0]
        return {
            "user": users,
            "positive": cast(self._items.take(position), "int64"),
            "negative": self._sets.others(users, below(bits[:, 1:], self._sets.num_others(users)))[:, 0] - 1,
        }


class UserItems(Movable):
    """Data set of users who have training items; a sample is a user with the user's training items.

    users: (n,) int64, the user of each sample. sizes: (n,) int64, the number of items of each sample.
    """

    stays = frozenset({"users", "sizes"})

    def __init__(self, catalogue: Catalogue) -> None:
        self._padding = catalogue.num_items
        self._items = catalogue.train
        self.users = np.flatnonzero(self._items.sizes)
        self.sizes = self._items.sizes[self.users]

    def __len__(self) -> int:
        return len(self.users)

    def weights(self, keys: SampleKeys) -> np.ndarray:
        """Returns the number of items of each sample's user, (B,) float32."""
        return self.sizes[keys.index].astype(np.float32)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns {"user": (B,) int64, "items": (B, P) int64, "weight": (B,) float32}; pads items with num_items."""
        users = self.users[keys.index]
        return {
            "user": self.here(users),
            "items": padded(self._items, users, self._padding, keys),
            "weight": self.here(self.weights(keys)),
        }


class Triples(Movable):
    """Data set of edges, each with a negative: a random node that the relation does not join to the edge's head.

    It has one sample per edge. The samples of an epoch go through the head nodes repeatedly, each time in a new random
    order. A sample draws one of its head's edges uniformly, as in the published code of KGAT.
    """

    rows_alike = True

    def __init__(self, edges: Edges, seed: int) -> None:
        """Raises UserError if a relation joins a head to every node, which leaves no negative."""
        self._seed = seed
        order = np.lexsort((edges.tail, edges.relation, edges.head))
        head, self._relation, self._tail = (ids[order] for ids in (edges.head, edges.relation, edges.tail))
        self._degrees = np.bincount(head, minlength=edges.num_nodes)
        self._offsets = np.concatenate([[0], np.cumsum(self._degrees)])
        self._heads = np.flatnonzero(self._degrees)
        # the tails of each pair (head, relation) form a set
        is_first = (np.diff(head, prepend=-1) != 0) | (np.diff(self._relation, prepend=-1) != 0)
        self._set_of_edge = (np.cumsum(is_first) - 1).astype(np.int32)
        first = np.flatnonzero(is_first)
        self._sets = ItemSets.of_sorted(np.append(first, len(head)), self._tail + 1, edges.num_nodes)
        full = np.flatnonzero(self._sets.num_others(np.arange(len(first))) == 0)
        if len(full):
            edge = first[full[0]]
            raise UserError(
                f"--data-dir: relation {self._relation[edge]} joins node {head[edge]} to all {edges.num_nodes} nodes, "
                "so no node is left as a negative; remove this relation from the graph"
            )

    def __len__(self) -> int:
        return len(self._tail)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns {"head", "relation", "tail", "negative"}, (B,) int64 each."""
        index = self.here(keys.index)
        bits = random_bits(self._seed, keys.epoch, index, 2, _TAIL_STREAM)
        turns = _turns(self._seed, keys.epoch, len(self._heads), len(self), _HEAD_STREAM, self.device)
        heads = self._heads.take(cast(turns.take(index), "int64"))
        edge = self._offsets.take(heads) + below(bits[:, :1], self._degrees.take(heads))[:, 0]
        sets = cast(self._set_of_edge.take(edge), "int64")
        return {
            "head": heads,
            "relation": cast(self._relation.take(edge), "int64"),
            "tail": cast(self._tail.take(edge), "int64"),
            "negative": self._sets.others(sets, below(bits[:, 1:], self._sets.num_others(sets)))[:, 0] - 1,
        }


class UsersToRank(Movable):
    """Data set of users who have held-out items; a sample is a user with the user's held-out and seen items.

    Samples are sorted by the number of seen items.

    users: (n,) int64, the user of each sample.
    """

    stays = frozenset({"users"})

    def __init__(self, catalogue: Catalogue, split: Literal["val", "test"]) -> None:
        self._padding = catalogue.num_items
        self._positives = catalogue.test if split == "test" else catalogue.val
        self._seen = catalogue.seen if split == "test" else catalogue.train
        users = np.flatnonzero(self._positives.sizes)
        self.users = users[np.argsort(self._seen.sizes[users], kind="stable")]

    def __len__(self) -> int:
        return len(self.users)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        """Returns {"user": (B,), "positives": (B, P), "seen": (B, S)}, int64, with lists padded with num_items.

        "seen" contains items that are not recommended: training items and, in the test, separate validation items.
        """
        users = self.users[keys.index]
        return {
            "user": self.here(users),
            "positives": padded(self._positives, users, self._padding, keys),
            "seen": padded(self._seen, users, self._padding, keys),
        }


def padded(lists: ItemLists, users: np.ndarray, padding: int, keys: SampleKeys) -> Array:
    """Returns the items of users (B,), padded at the end to `keys.padded_length`: (B, S) int64."""
    start = lists.offsets[users]
    length = lists.offsets[users + 1] - start
    rows = Ragged(lists.here(start), lists.here(length), keys.padded_length(length.max(initial=0), _STEP))
    items = cast(rows.of(lists.items), "int64")
    return namespace(items).where(rows.is_real, items, padding)


@lru_cache(maxsize=4)  # for two data sets, each in the current epoch and the next, whose first batches are prefetched
def _turns(seed: int, epoch: int, num_things: int, num_samples: int, stream: int, device: torch.device | None) -> Array:
    """Returns the index of each sample's user or node: concatenated random permutations of range(num_things), int32.

    The length is the smallest multiple of num_things that is at least num_samples.
    """
    num_rounds = -(-num_samples // num_things)
    rounds = np.arange(num_rounds) if device is None else torch.arange(num_rounds, device=device)
    bits = random_bits(seed, epoch, rounds, num_things, stream)
    # torch's words are signed; with the highest bit flipped they sort like numpy's unsigned words
    order = np.argsort(bits, axis=1, kind="stable") if on_host(bits) else (bits ^ -(2**63)).argsort(dim=1, stable=True)
    return cast(order, "int32").ravel()
