"""Reads a `Catalogue` from files in the two layouts that most published data sets have.

The layout of KGAT (Wang et al., KDD 2019) has `train.txt`, `test.txt` and optionally `valid.txt`, with a line `user
item item ...` per user; `kg_final.txt`, with a line `head relation tail` per triple; and optionally lists of all users,
items, entities and relations, such as `user_list.txt`, which begin with a header.

The layout of KGCN (Wang et al., WWW 2019) has `ratings_final`, with a line `user item label` per rating, where label 1
means that the user has the item; `kg_final`; and optionally `item_index2entity_id.txt`, with a line per item.
`ratings_final` and `kg_final` end in `.txt` or `.npy`; `.npy` takes precedence.

`data.knowledge_graph.tables` reads other data sets: tables with named columns.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import DataFile, not_read, shown
from data.interactions.columns import FIND_OUT, ColumnChoice
from data.interactions.item_sets import sorted_distinct
from data.knowledge_graph.catalogue import NO_TRIPLES, Catalogue, ItemLists
from data.knowledge_graph.files import DataFiles, find_files
from data.knowledge_graph.numbers import Numbers
from data.knowledge_graph.splits import hold_out_test, with_validation
from data.knowledge_graph.tables import read_tables, tables_of
from data.table_files import STRICT, Reading
from trainer.common.errors import UserError
from trainer.loading.cache import Arrays, cached_arrays, key_of

_FORMAT_VERSION = 5
_KGAT_FILES = ("train.txt", "test.txt")
_RATINGS_FILES = ("ratings_final.npy", "ratings_final.txt", "ratings_final")
_GRAPH_FILES = ("kg_final.npy", "kg_final.txt", "kg_final")
_LISTS = ("user_list.txt", "item_list.txt", "entity_list.txt", "relation_list.txt", "item_index2entity_id.txt")
_IDS_FOR_ONE = 10
"""An id above 1000 + this factor times the number of distinct ids is an error, since embeddings have a row per id."""
_NUMBERED = "far larger than the other ids, which should be 0, 1, 2, ... with few gaps"


def load_catalogue(
    path: Path, cache_dir: Path, *, val_share: float, seed: int, selects_on_test: bool,
    columns: ColumnChoice = FIND_OUT, reading: Reading = STRICT,
) -> Catalogue:  # fmt: skip
    """Reads a data set; the parsed arrays are cached.

    path: a table of interactions; or a folder, .zip or .tar.gz with the files at its top or in one folder. Files may be
        compressed. The graph is optional. Repeated entries of a file count once.
    val_share: share of each user's training items to hold out for validation, 0 <= val_share < 1, if there is no
        `valid.txt`. Every user keeps at least one training item.
    seed: determines the validation items and, without a test file, the test items: 20 % of each user's items, the
        latest if there are times.
    selects_on_test: whether to use the test set for validation too, as in the published code of KGAT; no training item
        is held out then, and `valid.txt` is ignored.
    columns, reading: chosen columns, encoding and treatment of bad lines, for tables.

    Raises UserError if the data set is missing, damaged or inconsistent.
    """
    files = find_files(path, (*_KGAT_FILES, *_RATINGS_FILES))
    settings = (val_share, seed, selects_on_test)

    def build() -> Arrays:
        if files.find(*_KGAT_FILES):
            published = _read_kgat(files)
        elif ratings := files.find(*_RATINGS_FILES):
            published = _read_kgcn(files, ratings, seed)
        elif {"item_index2entity_id.txt", "kg.txt"} <= files.by_name.keys():
            raise not_read(files.where, "KGCN's raw data, before its preprocess.py", "kgcn")
        elif (tables := tables_of(list(files.by_name.values()), reading))["interactions"]:
            published = read_tables(tables, files.where, columns, reading, seed)
        else:
            raise UserError(
                f"{files.where}: has neither KGAT's train.txt and test.txt, nor KGCN's ratings_final, nor a table "
                "with columns such as user and item; files found: "
                f"{shown(file.name for file in files.by_name.values())}"
            )
        return with_validation(published, val_share=val_share, seed=seed, selects_on_test=selects_on_test).arrays

    names = (*_KGAT_FILES, "valid.txt", *_RATINGS_FILES, *_GRAPH_FILES, *_LISTS)
    is_published = files.find(*_KGAT_FILES, *_RATINGS_FILES) is not None
    stamps = files.stamps(names if is_published else sorted(files.by_name))
    key = key_of("knowledge_graph", _FORMAT_VERSION, stamps, settings, columns, reading)
    return Catalogue.of_arrays(cached_arrays(cache_dir, key, build))


@dataclass(frozen=True)
class _UserLines:
    """Pairs of user and item in a file with lines `user item item ...`.

    users, items: (n,) int64. rows: (n,) int64, row of each pair in `numbers`.
    """

    numbers: Numbers
    users: np.ndarray
    items: np.ndarray
    rows: np.ndarray

    @classmethod
    def read(cls, file: DataFile) -> "_UserLines":
        numbers = Numbers.read(file)
        users = numbers.first
        is_again = np.ones(len(users), bool)
        is_again[np.unique(users, return_index=True)[1]] = False
        numbers.refuse(is_again, "user {user} has an earlier line, which must be joined with this line", user=users)
        rows = np.repeat(np.arange(len(users)), np.diff(numbers.offsets) - 1)
        return cls(numbers, users[rows], np.delete(numbers.values, numbers.offsets[:-1]), rows)

    def lists(self, num_users: int) -> ItemLists:
        return ItemLists.of_pairs(self.users, self.items, num_users)

    def refuse(self, is_wrong: np.ndarray, reason: str) -> None:
        """Raises UserError for the first wrong pair. is_wrong: (n,) bool. reason: template with {user} and {item}."""
        self.numbers.refuse(is_wrong, reason, self.rows, user=self.users, item=self.items)


def _read_kgat(files: DataFiles) -> Catalogue:
    files_of_lines = {name: files.named(name) for name in _KGAT_FILES}
    if valid_file := files.find("valid.txt"):
        files_of_lines["valid.txt"] = valid_file
    lines = {name: _UserLines.read(file) for name, file in files_of_lines.items()}
    for part in lines.values():
        if not len(part.items):
            raise UserError(
                f"{part.numbers.where}: no user has an item; download the file again, or remove it if it is optional"
            )
    of_train = lines["train.txt"].numbers
    of_train.refuse(np.diff(of_train.offsets) == 1, "the user has no items")
    users_listed, items_listed = _num_listed(files, "user_list.txt"), _num_listed(files, "item_list.txt")
    for part in lines.values():
        _check_ids(part.numbers, "user", part.users, part.users, users_listed, "user_list.txt", part.rows)
        _check_ids(part.numbers, "item", part.items, part.items, items_listed, "item_list.txt", part.rows)
    num_users = max(int(part.users.max()) for part in lines.values()) + 1
    num_items = max(items_listed or 0, *(int(part.items.max(initial=-1)) + 1 for part in lines.values()))
    triples, relation_names = _read_graph(files, num_items)
    is_known = _are_known(lines["train.txt"].items, triples, num_items)
    _check_held_out(lines, num_users, is_known, has_graph=len(triples) > 0)
    lists = {name: part.lists(num_users) for name, part in lines.items()}
    train, test = (lists[name] for name in _KGAT_FILES)
    if items_listed is not None:
        is_known[:items_listed] = True
    unknown = np.flatnonzero(~is_known)
    val = lists.get("valid.txt", ItemLists.empty(num_users))
    return Catalogue(num_users, num_items, train, val, test, triples, relation_names, unknown)


def _are_known(items: np.ndarray, triples: np.ndarray, num_items: int) -> np.ndarray:
    """Returns which items occur in interactions or the graph: (num_items,) bool. items: (n,), items of interactions."""
    is_known = np.zeros(num_items, bool)
    is_known[items] = True
    entities = triples[:, [0, 2]]
    is_known[entities[entities < num_items]] = True
    return is_known


def _check_held_out(lines: dict[str, _UserLines], num_users: int, is_known: np.ndarray, has_graph: bool) -> None:
    """Raises UserError if a validation or test item cannot be recommended. is_known: result of `_are_known`."""
    train = lines["train.txt"]
    is_trained_on = np.zeros(num_users, bool)
    is_trained_on[train.users] = True
    places = "train.txt nor in the graph" if has_graph else "train.txt"
    earlier = {"train.txt": train.lists(num_users)}
    for name in sorted(lines.keys() - earlier.keys(), reverse=True):  # the validation file comes before the test file
        part = lines[name]
        part.refuse(~is_trained_on[part.users], "user {user} has no items in train.txt")
        part.refuse(~is_known[part.items], "item {item} occurs neither in " + places)
        for other_name, other in earlier.items():
            part.refuse(
                other.contain(part.users, part.items),
                "user {user} has item {item} in " + other_name + " too, but known items are never recommended",
            )
        earlier[name] = part.lists(num_users)


def _read_kgcn(files: DataFiles, file: DataFile, seed: int) -> Catalogue:
    ratings = Numbers.read(file)
    users, items, labels = ratings.columns("user item label").T
    ratings.refuse(labels > 1, "label {label} is neither 0 nor 1", label=labels)
    num_listed = _num_listed(files, "item_index2entity_id.txt")
    _check_ids(ratings, "user", users, users)
    _check_ids(ratings, "item", items, items, num_listed, "item_index2entity_id.txt")
    num_items = int(items.max()) + 1 if num_listed is None else num_listed
    num_users = int(users.max()) + 1
    positives = ItemLists.of_pairs(users[labels == 1], items[labels == 1], num_users)
    train, test, note = hold_out_test(positives, seed, file.where)
    triples, relation_names = _read_graph(files, num_items)
    is_known = _are_known(items, triples, num_items) | (num_listed is not None)
    unknown = np.flatnonzero(~is_known)
    val = ItemLists.empty(num_users)
    return Catalogue(num_users, num_items, train, val, test, triples, relation_names, unknown, (note,))


def _read_graph(files: DataFiles, num_items: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Reads the distinct triples, (m, 3) int32, and the relations' names; each is empty if its file is missing."""
    file, names = files.find(*_GRAPH_FILES), _read_relation_names(files)
    if file is None:
        return NO_TRIPLES, names
    numbers = Numbers.read(file)
    triples = numbers.columns("head relation tail")
    heads, relations, tails = triples.T
    entities = np.concatenate([heads, tails, np.arange(num_items)])
    num_entities = _num_listed(files, "entity_list.txt")
    _check_ids(numbers, "head", heads, entities, num_entities, "entity_list.txt")
    _check_ids(numbers, "relation", relations, relations, len(names) or None, "relation_list.txt")
    _check_ids(numbers, "tail", tails, entities, num_entities, "entity_list.txt")
    if not (triples[:, [0, 2]] < num_items).any():
        raise UserError(
            f"{file.where}: none of its {len(triples)} triples contains an item of the interactions (an id below "
            f"{num_items}); give the graph of these items"
        )
    triples = triples[np.lexsort(triples.T[::-1])].astype(np.int32)
    is_new = np.append(True, (np.diff(triples, axis=0) != 0).any(axis=1))
    return triples[is_new], names


def _check_ids(
    numbers: Numbers,
    what: str,
    ids: np.ndarray,
    all_ids: np.ndarray,
    num_listed: int | None = None,
    list_name: str = "",
    rows: np.ndarray | None = None,
) -> None:
    """Raises UserError for the first id that is too large for the number of distinct ids, or missing from a list.

    ids: (n,), ids to check. all_ids: (m,), ids to count. num_listed: length of the list, if there is a list. rows: as
    for `Numbers.refuse`.
    """
    largest = _IDS_FOR_ONE * len(sorted_distinct(all_ids)) + 1000
    numbers.refuse(ids > largest, f"{what} {{id}} is {_NUMBERED}", rows, id=ids)
    if num_listed is not None:
        reason = f"{what} {{id}} is not among the {num_listed} ids of {list_name}"
        numbers.refuse(ids >= num_listed, reason, rows, id=ids)


def _num_listed(files: DataFiles, name: str) -> int | None:
    file = files.find(name)
    return None if file is None else len(_listed(file))


def _read_relation_names(files: DataFiles) -> tuple[str, ...]:
    """Reads the relations' names in the order of ids; () without a list."""
    file = files.find("relation_list.txt")
    if file is None:
        return ()
    names: dict[int, str] = {}
    lines = _listed(file)
    for line in lines:
        *name, number = line.decode(errors="replace").split()
        if not number.isdecimal() or int(number) >= len(lines) or int(number) in names:
            raise UserError(
                f"{file.where}: {line.decode(errors='replace')!r}: each line must have a name and an id, and each id "
                f"from 0 to {len(lines) - 1} must occur once; fix the file, or remove it"
            )
        names[int(number)] = " ".join(name)
    return tuple(names[i] for i in range(len(names)))


def _listed(file: DataFile) -> list[bytes]:
    """Returns the lines of a list file without its header."""
    lines = [line for line in file.read().splitlines() if line.strip()]
    return lines[1:] if lines and lines[0].startswith(b"org_id") else lines
