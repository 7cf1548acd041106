import gzip
import io
import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from data.knowledge_graph.catalogue import Catalogue, ItemLists
from data.knowledge_graph.numbers import LARGEST_ID
from data.knowledge_graph.reader import load_catalogue
from data.knowledge_graph.splits import VAL_STREAM, hold_out
from tests.helpers.archives import tarred, zipped
from trainer.common.errors import UserError

KGAT = {
    "train.txt": "0 3 1\n1 2\n2 4 0 2 0\n",
    "valid.txt": "0 2\n1\n",
    "test.txt": "0 0\n2 1 3\n",
    "kg_final.txt": "0 0 5\n1 1 6\n4 0 5\n0 0 5\n6 2 7\n",
    "relation_list.txt": "org_id remap_id\nwritten by 1\ngenre 0\nseries 2\nnever 3\n",
}
TRAIN = [[1, 3], [2], [0, 2, 4]]
VALID = [[2], [], []]
TEST = [[0], [], [1, 3]]
TRIPLES = [[0, 0, 5], [1, 1, 6], [4, 0, 5], [6, 2, 7]]

RATINGS = np.array([[u, (3 * u + k) % 12, k % 3 > 0] for u in range(40) for k in range(9)], np.int32)
GRAPH = np.array([[i, 0, 12 + i % 4] for i in range(12)], np.int32)


def rows(table: np.ndarray) -> str:
    return "".join(" ".join(map(str, row)) + "\n" for row in table.tolist())


KGCN = {"ratings_final.txt": rows(RATINGS), "kg_final.txt": rows(GRAPH)}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


@pytest.fixture
def load(tmp_path: Path):
    """Returns a function that writes files into a folder, or bytes into one file, and reads them as a catalogue."""

    def run(files: dict[str, str | bytes] | bytes, name: str = "set", **settings) -> Catalogue:
        path = tmp_path / name
        if isinstance(files, bytes):
            path.write_bytes(files)
        else:
            for file, content in files.items():
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                (path / file).write_bytes(encoded(content))
        settings = {"val_share": 0.25, "seed": 0, "selects_on_test": False} | settings
        return load_catalogue(path, tmp_path / "cache", **settings)

    return run


def as_lists(lists: ItemLists) -> list[list[int]]:
    return [lists.of(user).tolist() for user in range(len(lists.offsets) - 1)]


def changed(**files: str | None) -> dict[str, str]:
    """Returns the files of KGAT with some replaced, or removed if None."""
    names = {name.partition(".")[0]: name for name in KGAT}
    changes = {names.get(name, f"{name}.txt"): content for name, content in files.items()}
    return {name: content for name, content in (KGAT | changes).items() if content is not None}


def assert_same(one: Catalogue, other: Catalogue) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)


# Layouts


def test_the_kgat_layout_is_read(load) -> None:
    catalogue = load(KGAT)
    counts = (catalogue.num_users, catalogue.num_items, catalogue.num_entities, catalogue.num_relations)
    assert counts == (3, 5, 8, 3) and catalogue.has_graph and not catalogue.selects_on_test
    assert [as_lists(lists) for lists in (catalogue.train, catalogue.val, catalogue.test)] == [TRAIN, VALID, TEST]
    assert catalogue.triples.tolist() == TRIPLES
    assert catalogue.relation_names == ("genre", "written by", "series")
    for lists in (catalogue.train, catalogue.val, catalogue.test):
        assert lists.offsets.dtype == np.int64 and lists.items.dtype == np.int32
    assert catalogue.triples.dtype == np.int32
    assert catalogue.train.sizes.tolist() == [2, 1, 3] and len(catalogue.train) == 6
    assert catalogue.train.users.tolist() == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("files", [KGAT, KGCN], ids=["kgat", "kgcn"])
def test_folder_zip_gzip_and_line_ends_agree(load, files) -> None:
    expected = load(files)
    extra = {"README.md": "no numbers"}
    assert_same(load({f"any name/{name}": content for name, content in (files | extra).items()}, "nested"), expected)
    assert_same(
        load({f"{name}.gz": gzip.compress(content.encode()) for name, content in files.items()}, "gz"), expected
    )
    assert_same(load(zipped(files | extra), "flat.zip"), expected)
    assert_same(load(tarred({f"any name/{name}": content for name, content in files.items()}), "x.tar.gz"), expected)
    inner = {f"a/b/{name}": content for name, content in files.items()} | {f"__MACOSX/a/b/._{n}": "" for n in files}
    assert_same(load(zipped(inner), "nested.zip"), expected)
    windows = {name: "\ufeff" + content.replace("\n", "\r\n") for name, content in files.items()}
    windows["relation_list.txt"] = files.get("relation_list.txt", "").replace("\n", "\r\n")
    assert_same(load({name: content for name, content in windows.items() if content}, "windows"), expected)
    spaced = {
        name: content if name == "relation_list.txt" else "\n" + content.replace(" ", "\t ").replace("\n", " \n\n")
        for name, content in files.items()
    }
    assert_same(load(spaced, "spaced"), expected)
    assert_same(load({name: content.rstrip("\n") for name, content in files.items()}, "no last end"), expected)


def test_arrays_of_numpy_agree_with_text(load) -> None:
    expected = load(KGCN)
    for names in (("ratings_final.npy", "kg_final.npy"), ("ratings_final.npy", "kg_final.txt")):
        graph = npy(GRAPH.astype(np.int64)) if names[1].endswith("npy") else rows(GRAPH)
        assert_same(load({names[0]: npy(RATINGS), names[1]: graph}, f"with {names[1]}"), expected)


def test_ratings_are_split_by_user(load) -> None:
    catalogue = load(KGCN, val_share=0.25)
    assert (catalogue.num_users, catalogue.num_items, catalogue.num_entities) == (40, 12, 16)
    positives = [sorted(item for u, item, label in RATINGS.tolist() if u == user and label) for user in range(40)]
    parts = [as_lists(lists) for lists in (catalogue.train, catalogue.val, catalogue.test)]
    assert [sorted(chain(*lists)) for lists in zip(*parts, strict=True)] == positives  # none twice, none missing
    assert all(parts[0])
    # Of six positives per user, 1.2 (20 %) are test items and 25 % of the rest validation items, rounded at random.
    assert {len(items) for items in parts[2]} == {1, 2} and 40 < len(catalogue.test) < 56
    assert {len(items) for items in parts[1]} == {1, 2} and 40 < len(catalogue.val) < 60


def test_lists_of_items_may_name_items_without_interactions(load) -> None:
    more = {"item_list.txt": "org_id remap_id\n" + "".join(f"i{i} {i}\n" for i in range(7))}
    assert load(KGAT | more).num_items == 7
    assert load(KGCN | {"item_index2entity_id.txt": "x y\n" * 15}, "kgcn").num_items == 15


def test_interactions_without_a_graph_are_read(load) -> None:
    catalogue = load(changed(kg_final=None))
    assert not catalogue.has_graph and catalogue.triples.shape == (0, 3)
    assert (catalogue.num_entities, catalogue.num_relations, catalogue.relation_names) == (5, 0, ())


# Validation


def test_published_protocol_selects_on_test(load) -> None:
    for files in (KGAT, changed(valid=None)):
        catalogue = load(files, f"{len(files)} files", selects_on_test=True)
        assert catalogue.selects_on_test and catalogue.val is catalogue.test
        assert as_lists(catalogue.train) == TRAIN and as_lists(catalogue.test) == TEST


def test_held_out_items_depend_only_on_seed_user_and_item(load) -> None:
    rng = np.random.default_rng(0)
    lists = [rng.choice(99, rng.integers(1, 40), replace=False) for _ in range(60)]
    lists[0] = np.array([5])

    def files(order) -> dict[str, str]:
        train = "".join(f"{user} " + " ".join(map(str, lists[user][::order])) + "\n" for user in range(60)[::order])
        return {"train.txt": train, "test.txt": "0 99\n", "kg_final.txt": "99 0 100\n"}

    catalogue, reversed_files, other = load(files(1)), load(files(-1), "reversed"), load(files(1), seed=1)
    assert_same(reversed_files, catalogue)
    assert as_lists(other.val) != as_lists(catalogue.val)
    for user, items in enumerate(lists):
        train, val = catalogue.train.of(user).tolist(), catalogue.val.of(user).tolist()
        assert sorted(train + val) == sorted(items.tolist()) and train
        share = 0.25 * len(items)
        assert len(items) == 1 or np.floor(share) <= len(val) <= np.ceil(share)
    # No item or place in the list is held out more often than another one.
    everything = ItemLists.of_pairs(np.repeat(np.arange(60), [*map(len, lists)]), np.concatenate(lists), 60)
    held_out = [hold_out(everything, 0.25, seed, VAL_STREAM)[1].of(1) for seed in range(400)]
    times = np.bincount(np.concatenate(held_out), minlength=99)[lists[1]]
    assert len(times) > 9 and np.abs(times - 100).max() < 45  # five standard deviations


def test_every_user_keeps_an_item() -> None:
    lists = ItemLists.of_pairs(np.array([0, 1, 1, 3, 3, 3]), np.array([4, 0, 9, 1, 2, 3]), 5)
    for seed in range(20):
        rest, held_out = hold_out(lists, 0.99, seed, VAL_STREAM)
        assert rest.sizes.tolist() == [1, 1, 0, 1, 0] and as_lists(rest.joined_with(held_out)) == as_lists(lists)


# Invalid files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train": "0 3 1\n1 x\n"}, r"train.txt, line 2: '1 x': 'x' is not a whole number of at least 0; fix the file"),
        ({"train": "user_id item_ids\n0 3 1\n"}, r"train.txt, line 1: .* .column names are not allowed.; fix"),
        ({"train": "0 3 1\n\n1 -2\n"}, r"train.txt, line 3: '1 -2': '-2' is not a whole number"),
        ({"test": "0 1.5\n"}, r"test.txt, line 1: '0 1.5': '1.5' is not a whole number"),
        ({"train": "0 \u0663\n"}, r"train.txt, line 1: .* is not a whole number"),
        ({"train": f"0 1\n1 {LARGEST_ID + 1}\n"}, r"line 2: .*: 100000001 is not an id from 0 to"),
        ({"kg_final": f"0 0 {10**30}\n"}, r"kg_final.txt, line 1: .* is not an id"),
        ({"train": "0 3 1\n1 90000\n"}, r"train.txt, line 2: '1 90000': item 90000 is far larger than the other ids"),
        ({"test": "90000 1\n"}, r"test.txt, line 1: '90000 1': user 90000 is far larger than the other ids"),
        ({"kg_final": "0 0 5\n1 0 90000\n"}, r"kg_final.txt, line 2: '1 0 90000': tail 90000 is far larger"),
        ({"kg_final": "0 0 5\n1 90000 5\n"}, r"kg_final.txt, line 2: '1 90000 5': relation 90000 is far larger"),
        ({"kg_final": "0 0 5\n\n1 6\n"}, r"kg_final.txt, line 3: '1 6': has 2 columns instead of `head relation tail`"),
        ({"kg_final": "0 0 5 1\n"}, r"line 1: '0 0 5 1': has 4 columns instead of"),
        ({"kg_final": "5 0 6\n6 0 7\n"}, r"kg_final.txt: none of its 2 triples contains an item .* below 5.; give"),
        ({"kg_final": "0 4 5\n"}, r"kg_final.txt, line 1: '0 4 5': relation 4 is not among the 4 ids of relation_list"),
        (
            {"entity_list": "a 0\nb 1\nc 2\nd 3\ne 4\nf 5\n"},
            r"kg_final.txt, line 5: '6 2 7': head 6 is not among the 6 ids",
        ),
        (
            {"entity_list": "a 0\n" * 6, "kg_final": "7 0 0\n"},
            r"line 1: '7 0 0': head 7 is not among the 6 ids of entity_l",
        ),
        (
            {"user_list": "org_id remap_id\na 0\nb 1\n"},
            r"train.txt, line 3: .*: user 2 is not among the 2 ids of user_list",
        ),
        (
            {"item_list": "org_id remap_id\na 0\nb 1\nc 2\n"},
            r"train.txt, line 1: .*: item 3 is not among the 3 ids of item",
        ),
        ({"relation_list": "a 0\nb 2\n"}, r"relation_list.txt: 'b 2': each line must have a name and an id, and"),
        ({"relation_list": "a 0\nb 0\n"}, r"relation_list.txt: 'b 0'"),
        ({"relation_list": "a\n"}, r"relation_list.txt: 'a'"),
        ({"train": "0 1\n1\n2 0\n"}, r"train.txt, line 2: '1': the user has no items"),
        ({"train": "0 1\n1 2\n0 3\n"}, r"train.txt, line 3: '0 3': user 0 has an earlier line, which must be joined"),
        ({"test": "0 0\n0 4\n"}, r"test.txt, line 2: '0 4': user 0 has an earlier line"),
        ({"test": "0 0\n3 1\n"}, r"test.txt, line 2: '3 1': user 3 has no items in train.txt"),
        ({"valid": "4 1\n"}, r"valid.txt, line 1: '4 1': user 4 has no items in train.txt"),
        ({"test": "0 0\n1 9\n"}, r"test.txt, line 2: '1 9': item 9 occurs neither in train.txt nor in the graph"),
        ({"valid": "0 9\n", "kg_final": None}, r"valid.txt, line 1: '0 9': item 9 occurs neither in train.txt; fix"),
        ({"test": "2 3 0\n"}, r"test.txt, line 1: '2 3 0': user 2 has item 0 in train.txt too, but known items are"),
        ({"valid": "0 3\n"}, r"valid.txt, line 1: '0 3': user 0 has item 3 in train.txt too"),
        ({"test": "0 2\n"}, r"test.txt, line 1: '0 2': user 0 has item 2 in valid.txt too"),
        ({"train": ""}, r"train.txt: is empty"),
        ({"kg_final": " \n\n"}, r"kg_final.txt: is empty; download it again"),
        ({"train": None}, r": has no train.txt; .* found: kg_final.txt, relation_list.txt, test.txt, valid.txt$"),
        ({"test": None}, r": has no test.txt; .* found: kg_final.txt, relation_list.txt, train.txt, valid.txt$"),
        ({"train": None, "test": None}, r"set: has neither KGAT's train.txt .* nor KGCN's ratings_final, .*: kg_final"),
        ({"test": "0\n1\n"}, r"test.txt: no user has an item"),
        ({"valid": "0\n1\n"}, r"valid.txt: no user has an item"),
    ],
)
def test_errors_of_the_kgat_layout_are_named(load, files, message) -> None:
    with pytest.raises(UserError, match=r"^--data-dir .*" + message):
        load(changed(**files))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"ratings_final.txt": "0 1 1\n0 2\n"},
            r"ratings_final.txt, line 2: '0 2': has 2 columns instead of `user item la",
        ),
        ({"ratings_final.txt": "0 1 1\n0 2 5\n"}, r"ratings_final.txt, line 2: '0 2 5': label 5 is neither 0 nor 1"),
        ({"ratings_final.txt": "0 1 0\n0 2 1\n1 2 1\n"}, r"no user has enough items to hold one out"),
        ({"item_index2entity_id.txt": "a b\n" * 4}, r"line 2: '0 1 1': item 4 is not among the 4 ids of item_index"),
        ({"ratings_final.npy": npy(np.array([[0, 1, 1], [0, -1, 1]]))}, r"npy, line 2: '0 -1 1': -1 is not an id"),
        ({"ratings_final.npy": npy(np.ones((2, 3)))}, r"npy: is an array of float64 with shape \(2, 3\); give a two"),
        ({"ratings_final.npy": npy(np.ones(3, int))}, r"npy: is an array of int64 with shape \(3,\)"),
        ({"ratings_final.npy": npy(np.ones((0, 3), int))}, r"ratings_final.npy: is empty"),
        ({"ratings_final.npy": npy(np.array([{}]))}, r"npy: is damaged, or is not an array of numbers"),
        ({"ratings_final.npy": npy(RATINGS)[:-5]}, r"npy: is damaged, or is not an array of numbers"),
    ],
)
def test_errors_of_the_kgcn_layout_are_named(load, files, message) -> None:
    if "item_index2entity_id.txt" in files:
        files = files | {"ratings_final.txt": "0 3 1\n0 4 1\n"}
        message = message.replace("'0 1 1'", "'0 4 1'")
    with pytest.raises(UserError, match=r"^--data-dir .*" + message):
        load(KGCN | files)


def test_paths_without_one_data_set_are_refused(load, tmp_path) -> None:
    with pytest.raises(UserError, match=r"^--data-dir .*/nowhere: no such file or folder"):
        load_catalogue(tmp_path / "nowhere", tmp_path, val_share=0.1, seed=0, selects_on_test=False)
    with pytest.raises(UserError, match=r"train.txt: has no test.txt; give a folder that contains"):
        load(b"0 1\n", "train.txt")
    with pytest.raises(UserError, match=r"twice: 2 of its folders could be the data set; give the path of one folder$"):
        load({f"{folder}/{name}": content for name, content in KGAT.items() for folder in "ab"}, "twice")
    with pytest.raises(UserError, match=r"both: has train.txt and train.txt.gz; keep one of them$"):
        load(KGAT | {"train.txt.gz": gzip.compress(b"0 1\n")}, "both")
    with pytest.raises(UserError, match=r"empty.zip: has neither .* files found: no files$"):
        load(zipped({}), "empty.zip")


def test_the_folder_precedes_its_subfolders(load) -> None:
    alone = load(KGAT, "alone")
    assert_same(load(KGAT | {"old/train.txt": "0 1\n"}), alone)
    hidden = {f"set/{name}": content for name, content in KGAT.items()} | {".old/train.txt": "0 1\n"}
    assert_same(load(hidden, "hidden"), alone)
    assert_same(load(zipped(hidden), "hidden.zip"), alone)


def test_damaged_files_are_named(load) -> None:
    archive, packed = zipped(KGAT), gzip.compress(KGAT["train.txt"].encode() * 50)
    for name, content in {"text.zip": b"no archive", "cut.zip": archive[: len(archive) // 2]}.items():
        with pytest.raises(UserError, match=rf"{name}.* is damaged"):
            load(content, name)
    for kind, content in {"cut": packed[:-12], "text": b"0 1\n"}.items():
        with pytest.raises(UserError, match=r"train.txt.gz: cannot be read or is damaged"):
            load(changed(train=None) | {"train.txt.gz": content}, kind)


def test_no_validation_data_is_refused(load) -> None:
    with pytest.raises(UserError, match=r"^--val-share 0.0: leaves no user with an item for validation; choose"):
        load(changed(valid=None), val_share=0.0)


# The cache


def test_cached_data_are_not_read_again(load, tmp_path) -> None:
    first = load(KGAT)
    path = tmp_path / "set" / "train.txt"
    status = path.stat()
    path.write_text("x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    settings = {"val_share": 0.25, "seed": 0}
    assert_same(load_catalogue(tmp_path / "set", tmp_path / "cache", **settings, selects_on_test=False), first)
    with pytest.raises(UserError, match="not a whole number"):
        load_catalogue(tmp_path / "set", tmp_path / "cache", **settings, selects_on_test=True)


def test_the_cache_distinguishes_files(load) -> None:
    load(KGAT)
    assert as_lists(load(changed(test="0 4\n")).test) == [[4], [], []]
    assert as_lists(load(changed(test="0 4\n", valid="2 1 3\n")).val) == [[], [], [1, 3]]
    assert load({"relation_list.txt": "a 0\nb 1\nlast one\t2\n"}).relation_names == ("a", "b", "last one")


# The real data


@pytest.mark.parametrize(
    ("name", "counts", "sizes"),
    [
        ("kgat/lfm1m.zip", (5941, 10303, 27580, 6), (738_345, 103_187, 217_212, 70_953)),
        ("kgat/ml1m-freebase.zip", (6040, 3086, 96235, 9), (654_502, 91_188, 193_239, 124_644)),
    ],
)
def test_published_data_sets_have_published_sizes(tmp_path, name, counts, sizes) -> None:
    catalogue = load_real(name, tmp_path)
    assert (catalogue.num_users, catalogue.num_items, catalogue.num_entities, catalogue.num_relations) == counts
    lists = (catalogue.train, catalogue.val, catalogue.test)
    assert (*map(len, lists), len(catalogue.triples)) == sizes
    assert len(catalogue.relation_names) == counts[-1]


def test_amazon_book_is_read_without_its_graph(tmp_path) -> None:
    catalogue = load_real("kgat/amazon-book_without_kg.zip", tmp_path)
    assert (catalogue.num_users, catalogue.num_items, catalogue.num_entities) == (70679, 24915, 24915)
    assert not catalogue.has_graph and len(catalogue.train) + len(catalogue.val) == 652_514
    assert len(catalogue.test) == 193_920 and len(catalogue.val) == pytest.approx(65_251, rel=0.01)


def test_book_crossing_ratings_are_read(tmp_path) -> None:
    catalogue = load_real("mcclk_book", tmp_path)
    assert (catalogue.num_users, catalogue.num_items, catalogue.num_entities) == (17860, 14967, 77903)
    assert (catalogue.num_relations, len(catalogue.triples)) == (25, 151_500)
    assert len(catalogue.train) + len(catalogue.val) + len(catalogue.test) == 69_873
    assert catalogue.train.sizes.min() == 1


def load_real(name: str, cache_dir: Path) -> Catalogue:
    folder = os.environ.get("LOCKSTEP_DATA")
    if not folder or not Path(folder, name).exists():
        pytest.skip(f"set LOCKSTEP_DATA to a folder with {name}")
    return load_catalogue(Path(folder, name), cache_dir, val_share=0.1, seed=0, selects_on_test=False)
