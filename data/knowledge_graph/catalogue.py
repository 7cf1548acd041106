"""Data sets for recommendation with a knowledge graph: users' items and facts about the items.

Users and items count from 0, and item i is entity i of the graph; other entities follow the items.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from data.interactions.item_sets import sorted_distinct
from trainer.loading.cache import Arrays, array_of_texts, texts_of_array
from trainer.loading.on_device import Movable

SPLITS = ("train", "val", "test")
_TEXTS = ("relation_names", "notes", "user_names", "item_names", "entity_names")

NO_TRIPLES = np.empty((0, 3), np.int32)


@dataclass(frozen=True)
class ItemLists(Movable):
    """Distinct items of each user.

    offsets: (num_users + 1,) int64; user u's items are at offsets[u] to offsets[u + 1].
    items: (n,) int32, ascending for each user.
    """

    stays = frozenset({"offsets"})

    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def empty(cls, num_users: int) -> "ItemLists":
        """Builds lists without any item."""
        return cls(np.zeros(num_users + 1, np.int64), np.empty(0, np.int32))

    @classmethod
    def of_pairs(cls, users: np.ndarray, items: np.ndarray, num_users: int) -> "ItemLists":
        """Builds lists from (user, item) pairs (n,) int64, in any order, with repetitions."""
        stride = int(items.max(initial=0)) + 1
        users, items = np.divmod(sorted_distinct(users * stride + items), stride)
        return cls(np.searchsorted(users, np.arange(num_users + 1)), items.astype(np.int32))

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.items)

    @property
    def sizes(self) -> np.ndarray:
        """Number of items of each user: (num_users,) int64."""
        return np.diff(self.offsets)

    @property
    def users(self) -> np.ndarray:
        """User of each item: (n,) int64."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.sizes)

    def of(self, user: int) -> np.ndarray:
        """Returns one user's items: (sizes[user],) int32."""
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def contain(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Returns which of the pairs (n,) int64 are in the lists: (n,) bool."""
        stride = max(int(self.items.max(initial=0)), int(items.max(initial=0))) + 1
        pairs, own = users * stride + items, self.users * stride + self.items
        position = np.searchsorted(own, pairs)
        return np.append(own, -1)[position] == pairs

    def where(self, chosen: np.ndarray) -> "ItemLists":
        """Keeps the chosen pairs, (n,) bool, and all users."""
        return ItemLists(np.concatenate([[0], np.cumsum(chosen)])[self.offsets], self.items[chosen])

    def joined_with(self, other: "ItemLists") -> "ItemLists":
        """Returns the union with the pairs of the same users in another."""
        users, items = (np.concatenate(both) for both in ((self.users, other.users), (self.items, other.items)))
        return ItemLists.of_pairs(users, items.astype(np.int64), len(self.offsets) - 1)


@dataclass(frozen=True)
class Catalogue:
    """Interactions in three parts and a knowledge graph.

    train, val, test: ItemLists of all users; val is test itself if models are selected on the test set.
    triples: (m, 3) int32 head, relation, tail, distinct, ascending; none without a graph.
    relation_names: num_relations of them, or none if unknown.
    unknown_items: (k,) int64 ids below num_items that no file mentions: gaps in the numbering.
    notes: shown to the user.
    names: of users, items and other entities; none if the files number them.
    """

    num_users: int
    num_items: int
    train: ItemLists
    val: ItemLists
    test: ItemLists
    triples: np.ndarray
    relation_names: tuple[str, ...]
    unknown_items: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    notes: tuple[str, ...] = ()
    names: tuple[tuple[str, ...], ...] = ((), (), ())

    @property
    def has_graph(self) -> bool:
        return len(self.triples) > 0

    @cached_property
    def num_entities(self) -> int:
        """Returns the number of entities, items included."""
        return max(self.num_items, int(self.triples[:, [0, 2]].max(initial=-1)) + 1)

    @cached_property
    def num_relations(self) -> int:
        """Returns the number of relations of the triples."""
        return int(self.triples[:, 1].max(initial=-1)) + 1

    def user_name(self, user: int) -> str:
        return self.names[0][user] if self.names[0] else str(user)

    def entity_name(self, entity: int) -> str:
        """Returns the name of an entity or item."""
        if not self.names[1]:
            return str(entity)
        return self.names[1][entity] if entity < self.num_items else self.names[2][entity - self.num_items]

    @property
    def selects_on_test(self) -> bool:
        """Whether validation and test are the same items."""
        return self.val is self.test

    @property
    def seen(self) -> ItemLists:
        """Returns items never to recommend: those of training and, unless it is the test set, validation."""
        return self.train if self.selects_on_test else self.train.joined_with(self.val)

    @property
    def arrays(self) -> Arrays:
        """Returns the arrays to cache."""
        counts = np.array([self.num_users, self.num_items])
        arrays = {"counts": counts, "triples": self.triples, "unknown_items": self.unknown_items}
        for name, texts in zip(_TEXTS, (self.relation_names, self.notes, *self.names), strict=True):
            arrays[name] = array_of_texts(texts)
        for split in SPLITS:
            if split != "val" or not self.selects_on_test:
                lists: ItemLists = getattr(self, split)
                arrays |= {f"{split}_offsets": lists.offsets, f"{split}_items": lists.items}
        return arrays

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> "Catalogue":
        """Rebuilds a catalogue from its `arrays`."""
        lists = {
            split: ItemLists(arrays[f"{split}_offsets"], arrays[f"{split}_items"])
            for split in SPLITS
            if f"{split}_items" in arrays
        }
        num_users, num_items = arrays["counts"].tolist()
        relation_names, notes, *names = (texts_of_array(arrays[name]) for name in _TEXTS)
        train, val, test = lists["train"], lists.get("val", lists["test"]), lists["test"]
        triples, unknown = arrays["triples"], arrays["unknown_items"]
        return cls(num_users, num_items, train, val, test, triples, relation_names, unknown, notes, tuple(names))
