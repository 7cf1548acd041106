"""Data for recommendation with a knowledge graph: users' items, and facts about the items.

Users and items are numbered from 0. Item i is entity i of the graph; other entities follow the items.
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

    offsets: (num_users + 1,) int64; user u has items[offsets[u] : offsets[u + 1]]. items: (n,) int32, ascending for
    each user.
    """

    stays = frozenset({"offsets"})

    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def empty(cls, num_users: int) -> "ItemLists":
        return cls(np.zeros(num_users + 1, np.int64), np.empty(0, np.int32))

    @classmethod
    def of_pairs(cls, users: np.ndarray, items: np.ndarray, num_users: int) -> "ItemLists":
        """Builds lists from pairs of user and item, (n,) int64 each, in any order; pairs may repeat."""
        stride = int(items.max(initial=0)) + 1
        users, items = np.divmod(sorted_distinct(users * stride + items), stride)
        return cls(np.searchsorted(users, np.arange(num_users + 1)), items.astype(np.int32))

    def __len__(self) -> int:
        """Returns the number of pairs of user and item."""
        return len(self.items)

    @property
    def sizes(self) -> np.ndarray:
        """Number of items of each user: (num_users,) int64."""
        return np.diff(self.offsets)

    @property
    def users(self) -> np.ndarray:
        """User of each entry of `items`: (n,) int64."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.sizes)

    def of(self, user: int) -> np.ndarray:
        """Returns the items of a user: (sizes[user],) int32."""
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def contain(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Returns, for each pair of user and item, (n,) int64 each, whether the lists contain it: (n,) bool."""
        stride = max(int(self.items.max(initial=0)), int(items.max(initial=0))) + 1
        pairs, own = users * stride + items, self.users * stride + self.items
        position = np.searchsorted(own, pairs)
        return np.append(own, -1)[position] == pairs

    def where(self, chosen: np.ndarray) -> "ItemLists":
        """Returns the lists with only the chosen pairs of user and item. chosen: (n,) bool."""
        return ItemLists(np.concatenate([[0], np.cumsum(chosen)])[self.offsets], self.items[chosen])

    def joined_with(self, other: "ItemLists") -> "ItemLists":
        """Returns the union with other lists of the same users."""
        users, items = (np.concatenate(both) for both in ((self.users, other.users), (self.items, other.items)))
        return ItemLists.of_pairs(users, items.astype(np.int64), len(self.offsets) - 1)


@dataclass(frozen=True)
class Catalogue:
    """Training, validation and test interactions, and a knowledge graph.

    train, val, test: ItemLists of all users; if models are selected on the test set, val is the same object as test.
    triples: (m, 3) int32, head, relation and tail of each triple, distinct and sorted; m is 0 without a graph.
    relation_names: names of all relations; () if unknown.
    unknown_items: (k,) int64, item ids below num_items that no file contains.
    notes: remarks on the files, to print.
    names: three tuples with the names of users, items and other entities, empty if the files contain numbers.
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
        """Number of entities, including items."""
        return max(self.num_items, int(self.triples[:, [0, 2]].max(initial=-1)) + 1)

    @cached_property
    def num_relations(self) -> int:
        return int(self.triples[:, 1].max(initial=-1)) + 1

    def user_name(self, user: int) -> str:
        return self.names[0][user] if self.names[0] else str(user)

    def entity_name(self, entity: int) -> str:
        if not self.names[1]:
            return str(entity)
        return self.names[1][entity] if entity < self.num_items else self.names[2][entity - self.num_items]

    @property
    def selects_on_test(self) -> bool:
        """Whether the validation set is the test set."""
        return self.val is self.test

    @property
    def seen(self) -> ItemLists:
        """Items that are not recommended: training items and, unless validation is the test set, validation items."""
        return self.train if self.selects_on_test else self.train.joined_with(self.val)

    @property
    def arrays(self) -> Arrays:
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
