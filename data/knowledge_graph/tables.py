"""Reads a `Catalogue` from tables with named columns, in which users, items and entities may have any names.

A table with columns such as user, item and optionally time contains the interactions; two or three such tables
contain the training, validation (optional) and test sets. A table with head, relation and tail contains the graph. A
table with item and entity maps items to entities with other names. RecBole's `.inter`, `.kg` and `.link` are such
tables.
"""

from collections.abc import Sequence

import numpy as np

from data.csv_lines import plain_name, without_points
from data.files import DataFile, shown
from data.interactions.columns import NAMES, NO_TIMES, ColumnChoice
from data.interactions.table import read_table
from data.knowledge_graph.catalogue import NO_TRIPLES, Catalogue, ItemLists
from data.knowledge_graph.splits import hold_out_test
from data.table_files import TABLES, LeftOut, Reading, opened_table, parts_of
from trainer.common.errors import UserError

_SUFFIXES = (*TABLES, ".kg", ".link")
_GRAPH, _LINK = {"head", "relation", "tail"}, {"item", "entity"}


def tables_of(files: Sequence[DataFile], reading: Reading) -> dict[str, list[DataFile]]:
    """Groups files by content: "interactions", "graph" or "link"; ignores other files.

    Raises UserError if a file cannot be read and no other file contains interactions.
    """
    found: dict[str, list[DataFile]] = {"interactions": [], "graph": [], "link": []}
    unread: list[UserError] = []
    for file in files:
        names: set[str] = set()
        if len(files) == 1 or file.bare_name.endswith(_SUFFIXES):
            try:
                with opened_table(file, LeftOut(reading)) as table:
                    names = set(map(plain_name, table.header))
            except UserError as error:  # files that are not tables are ignored
                unread.append(error)
        if names >= _GRAPH:
            found["graph"].append(file)
        elif names & set(NAMES["user"]) and names & set(NAMES["item"]):
            found["interactions"].append(file)
        elif names >= _LINK:
            found["link"].append(file)
    if unread and not found["interactions"]:
        raise unread[0]
    if len(parts := parts_of(found["interactions"])) == len(found["interactions"]):
        found["interactions"] = parts
    return found


def read_tables(
    files: dict[str, list[DataFile]], where: str, columns: ColumnChoice, reading: Reading, seed: int
) -> Catalogue:
    """Reads a data set of tables, without splitting off a validation set. where: name of the data set in messages.

    Without a test file, holds out a part of each user's items, the latest if there are times. Raises UserError for
    ambiguous or unusable files.
    """
    for kind, most in (("interactions", 3), ("graph", 1), ("link", 1)):
        if len(files[kind]) > most or (
            kind == "interactions" and len(files[kind]) > 1 and parts_of(files[kind]) != files[kind]
        ):
            raise UserError(
                f"{where}: {shown(file.name for file in files[kind])} could each be the {kind}; keep only one of "
                "these files"
            )
    if len(files["interactions"]) > 1 and columns.time is None:
        columns = ColumnChoice(time=NO_TIMES)  # the files define the split
    table = read_table(files["interactions"], columns, reading)
    num_users, num_items = len(table.user_ids), len(table.item_ids)
    parts = [
        ItemLists.of_pairs(table.users[table.parts == k], table.items[table.parts == k], num_users)
        for k in range(len(files["interactions"]))
    ]
    notes = list(table.remarks)
    if len(parts) > 1:
        train, val, test = parts[0], parts[1] if len(parts) > 2 else ItemLists.empty(num_users), parts[-1]
    else:
        latest = None if table.times is None else _latest(parts[0], table.users, table.items, table.times)
        (train, test, note), val = hold_out_test(parts[0], seed, where, latest), ItemLists.empty(num_users)
        notes.append(note)
    triples, relations, entities = _read_graph(files, table.item_ids, reading, notes)
    names = (tuple(table.user_ids), tuple(table.item_ids), entities)
    return Catalogue(num_users, num_items, train, val, test, triples, relations, notes=tuple(notes), names=names)


def _latest(lists: ItemLists, users: np.ndarray, items: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the last time of each pair of user and item in the lists, (n,)."""
    order = np.lexsort((times, items, users))
    is_last = np.append((np.diff(users[order]) != 0) | (np.diff(items[order]) != 0), True)
    return times[order][is_last]


def _read_graph(
    files: dict[str, list[DataFile]], item_ids: Sequence[str], reading: Reading, notes: list[str]
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Reads the distinct triples (m, 3) int32, the relations' names, and the names of entities that are not items."""
    if not files["graph"]:
        return NO_TRIPLES, (), ()
    links = (_columns(file, ("item", "entity"), reading, notes) for file in files["link"])
    entity_of = {item: entity for link in links for item, entity in link}
    items = {entity_of.get(name, name): number for number, name in enumerate(item_ids)}
    relations: dict[str, int] = {}
    entities: dict[str, int] = {}

    def number_of(name: str) -> int:
        return items[name] if name in items else entities.setdefault(name, len(item_ids) + len(entities))

    triples = [
        (number_of(head), relations.setdefault(relation, len(relations)), number_of(tail))
        for head, relation, tail in _columns(files["graph"][0], ("head", "relation", "tail"), reading, notes)
    ]
    found = np.unique(np.array(triples, np.int32).reshape(-1, 3), axis=0)
    if not (found[:, [0, 2]] < len(item_ids)).any():
        raise UserError(
            f"{files['graph'][0].where}: none of its {len(found)} triples contains an item of the interactions "
            f"(for example {shown(item_ids[:3])}); name items in the graph as in the interactions, or add a table with "
            "columns item and entity"
        )
    return found, tuple(relations), tuple(entities)


def _columns(file: DataFile, names: Sequence[str], reading: Reading, notes: list[str]) -> list[tuple[str, ...]]:
    """Returns the cells of each complete line in the named columns; in a column of whole numbers, 7.0 becomes 7.

    names: normalised by `plain_name`. notes: list that receives remarks.
    """
    left_out = LeftOut(reading)
    with opened_table(file, left_out) as table:
        plain = list(map(plain_name, table.header))
        columns, rows = [plain.index(name) for name in names], list[tuple[str, ...]]()
        for number, fields in table.lines:
            row = tuple(fields[column].strip() for column in columns) if len(fields) == len(plain) else ()
            if all(row) and row:
                rows.append(row)
            else:
                line = f"{file.where}, line {number}: {','.join(fields)[:80]!r}: lacks one of {', '.join(names)}"
                left_out.add(line, f"{line}; fix the line, or skip such lines with --on-bad drop")
    notes += left_out.remarks()
    return list(zip(*map(without_points, zip(*rows, strict=True)), strict=True))
