import json

import pytest

from data.interactions.columns import ColumnChoice
from data.knowledge_graph.new_users import read_users
from data.knowledge_graph.reader import load_catalogue
from data.table_files import Reading
from tests.helpers.archives import zipped
from trainer.common.errors import UserError

USERS = "user,item,time\n" + "".join(f"u{u},i{(u + k) % 9},{100 * u + k}\n" for u in range(4) for k in range(5))
GRAPH = "head,relation,tail\ni0,of,Rock\ni3,of,Rock\nRock,in,Music\ni0,of,Rock\n"


@pytest.fixture
def load(tmp_path):
    def run(files, in_zip=False, **options):
        folder = tmp_path / "kg"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content)
        (tmp_path / "kg.zip").write_bytes(zipped({f"top/{name}": content for name, content in files.items()}))
        path = tmp_path / "kg.zip" if in_zip else folder if len(files) > 1 else folder / next(iter(files))
        split = {"val_share": 0.1, "seed": 0, "selects_on_test": True}
        return load_catalogue(path, tmp_path / "cache", **split, **options)

    return run


def named(catalogue, lists):
    users = [catalogue.user_name(user) for user in lists.users.tolist()]
    return set(zip(users, map(catalogue.entity_name, lists.items.tolist()), strict=True))


def as_json(table):
    names, *rows = (line.split(",") for line in table.splitlines())
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def recbole(table, *roles):
    names, *rows = table.splitlines()
    head = "\t".join(f"{name}_id:token" if name != "time" else "timestamp:float" for name in names.split(","))
    return "\n".join([head, *(row.replace(",", "\t") for row in rows)]) + "\n"


FORMS = {
    "CSV": {"interactions.csv": USERS, "graph.csv": GRAPH},
    "JSON lines": {"who.jsonl": as_json(USERS), "what.jsonl": as_json(GRAPH)},
    "RecBole's": {"x.inter": recbole(USERS), "x.kg": recbole(GRAPH), "x.item": "item_id:token\tname:token\n"},
    "RecBole's links": {
        "x.inter": recbole(USERS), "x.kg": recbole(GRAPH.replace("i0", "m.0").replace("i3", "m.3")),
        "x.link": "item_id:token\tentity_id:token\ni0\tm.0\ni3\tm.3\n",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_zip", [False, True])
def test_interactions_and_a_graph_are_read(form, in_zip, load):
    found = load(FORMS[form], in_zip)
    assert (found.num_users, found.num_items, found.num_entities, found.has_graph) == (4, 8, 10, True)
    assert named(found, found.test) == {(f"u{u}", f"i{(u + 4) % 9}") for u in range(4)}  # the latest fifth
    assert len(found.train) == 16 and found.relation_names == ("of", "in")
    triples = {(found.entity_name(h), found.relation_names[r], found.entity_name(t)) for h, r, t in found.triples}
    assert triples == {("i0", "of", "Rock"), ("i3", "of", "Rock"), ("Rock", "in", "Music")}
    assert any("Interactions: 20, from these columns" in note for note in found.notes)


@pytest.mark.parametrize("floats", ["interactions", "graph", "link", "users"])
def test_whole_numbers_with_decimals_are_the_same_ids_in_every_file(floats, load, tmp_path):
    """pandas writes a column of integers with empty cells as floats."""

    def table(name, header, rows):
        end = ".0" if name == floats else ""
        return header + "\n" + "".join(",".join(f"{number}{end}" for number in row) + "\n" for row in rows)

    pairs = [(user, item) for user in range(3) for item in range(8)]
    found = load({
        "interactions.csv": table("interactions", "user,item", pairs),
        "graph.csv": table("graph", "head,relation,tail", [(103, 1, 109), (100, 1, 103), (109, 1, 102)]),
        "link.csv": table("link", "item,entity", [(item, 100 + item) for item in range(4)]),
    })  # fmt: skip
    triples = {(found.entity_name(head), found.entity_name(tail)) for head, _, tail in found.triples}
    assert triples == {("3", "109"), ("0", "3"), ("109", "2")}
    (tmp_path / "users.csv").write_text(table("users", "user", [(2,), (0,)]))
    assert read_users(tmp_path / "users.csv", found)[0].tolist() == [2, 0]


def test_interactions_without_a_graph_are_split_by_time_or_at_random(load):
    found = load({"ratings.csv": USERS})
    assert not found.has_graph and len(found.test) == 4
    assert "Test: the latest fifth of each user's items." in found.notes
    found = load({"ratings.csv": "".join(line.rpartition(",")[0] + "\n" for line in USERS.splitlines())})
    assert len(found.train) + len(found.test) == 20 and 0 < len(found.test) < 10
    assert "Test: a random fifth of each user's items." in found.notes


def test_the_user_names_a_time_column_of_unusual_name(load):
    files = {"ratings.csv": USERS.replace("time", "Clicked At", 1)}
    with pytest.raises(UserError, match=r"recognised as the time; name it with --time-column; use --time-column none"):
        load(files)
    latest, named_time, numbered = (
        load({"ratings.csv": text}, columns=ColumnChoice(time=column))
        for text, column in ((USERS, None), (files["ratings.csv"], "Clicked At"), (files["ratings.csv"], "3"))
    )
    assert named(latest, latest.test) == named(named_time, named_time.test) == named(numbered, numbered.test)
    found = load(files, columns=ColumnChoice(time="none"))
    assert "Test: a random fifth of each user's items." in found.notes


def test_separate_files_define_the_split(load):
    head, rows = "user,item,at\n", ["a,1,7\na,2,8\nb,1,9\n", "a,3,1\n", "b,3,1\n"]  # times are ignored
    found = load(dict(zip(("train.csv", "valid.csv", "test.csv"), (head + row for row in rows), strict=True)))
    assert named(found, found.test) == {("b", "3")} and len(found.train) == 3
    with pytest.raises(UserError, match=r"more.csv, test.csv, train.csv, valid.csv could each be the interactions;"):
        load({"more.csv": head + rows[0]} | dict.fromkeys(("train.csv", "test.csv"), head + rows[0]))


def test_graphs_without_items_and_lines_with_missing_values_are_refused(load, tmp_path):
    with pytest.raises(UserError, match=r"graph.csv: none of its 1 triples .*\(for example i0, i1, i2\); name"):
        load({"interactions.csv": USERS, "graph.csv": "head,relation,tail\nx,y,z\n"})
    files = {"interactions.csv": USERS + "u0,,7\n", "graph.csv": GRAPH + "i1,of,\n"}
    with pytest.raises(UserError, match=r"interactions.csv, line 22: .*is empty.*--on-bad drop"):
        load(files)
    found = load(files, reading=Reading(on_bad="drop"))
    assert (
        len(found.triples) == 3
        and [note[:36] for note in found.notes if "cannot" in note] == ["Left out: 1 lines that cannot be rea"] * 2
    )
    with pytest.raises(UserError, match=r"kg: has neither KGAT's .*nor a table with columns such as user and item"):
        load({"interactions.csv": "a,b\n1,2\n", "graph.csv": GRAPH})


def test_files_that_are_not_tables_are_listed_if_there_is_no_table(load):
    assert load({"a.txt": "{\n", "x.inter": recbole(USERS)}).num_users == 4
    with pytest.raises(UserError, match=r"a.txt: is JSON of several lines"):
        load({"a.txt": "{\n", "x.inter": "a\tb\n"})


def test_users_are_read_by_name_and_unknown_ones_refused_or_skipped(load, tmp_path):
    found, path = load({"ratings.csv": USERS}), tmp_path / "users.csv"
    path.write_bytes("user_id\nu3\nnobody\nu0\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"line 3: 'nobody': give the id of a user .*, such as u0, u1, u2, or skip"):
        read_users(path, found)
    users, notes = read_users(path, found, Reading(on_bad="drop"))
    assert users.tolist() == [3, 0]
    assert notes == [
        f"Left out: 1 lines without the id of a user with training items, such as --predict {path}, line 3: 'nobody'."
    ]


@pytest.mark.parametrize("header", ["", "customer_id\n"])
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_users_can_be_named_plain_or_quoted_as_in_csv(header, ending, load, tmp_path):
    names = ['u "0"', '"all"', '"', "a, b", "line\u2028break", "client"]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    found, path = load({"ratings.csv": "user,item\n" + "".join(f"{n},1\n{n},2\n" for n in quoted)}), tmp_path / "u.csv"
    for written in (names, quoted):
        path.write_text(header + "\n".join(written), newline=ending)
        users, notes = read_users(path, found)
        assert [found.user_name(user) for user in users.tolist()] == names and not notes
