import numpy as np
import pytest

from data.knowledge_graph.new_users import Recommendations, read_users
from data.knowledge_graph.reader import load_catalogue
from tests.data.knowledge_graph.test_reader import KGAT, KGCN
from tests.helpers.mutations import mutations
from trainer.common.errors import UserError

SPLIT = {"val_share": 0.3, "seed": 0, "selects_on_test": False}
LAYOUTS = {"KGAT": KGAT, "KGCN": KGCN}
COUNT = 60


@pytest.mark.parametrize(
    ("layout", "damaged"),
    [("KGAT", name) for name in KGAT] + [("KGCN", name) for name in ("ratings_final.txt", "kg_final.txt")],
)
def test_a_damaged_data_set_is_read_or_refused(layout, damaged, tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in LAYOUTS[layout].items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    whole = (folder / damaged).read_bytes()
    for content in mutations(whole, COUNT, seed=5):
        (folder / damaged).write_bytes(content)
        try:
            catalogue = load_catalogue(folder, tmp_path / "cache", **SPLIT)
        except UserError as error:
            assert str(error).startswith(("--data-dir", "--val-share"))
        else:
            assert catalogue.train.items.max() < catalogue.num_items <= catalogue.num_entities
            assert not np.isin(catalogue.train.items, catalogue.unknown_items).any()
    assert {file.name for file in folder.iterdir()} == LAYOUTS[layout].keys()


def test_damaged_lists_of_users_are_read_or_refused(tmp_path) -> None:
    for name, content in KGAT.items():
        (tmp_path / name).write_text(content)
    catalogue = load_catalogue(tmp_path, tmp_path / "cache", **SPLIT)
    path = tmp_path / "users.csv"
    for content in mutations(b'user\n0\n2\n"1"\n0\n', COUNT, seed=6):
        path.write_bytes(content)
        try:
            users, _ = read_users(path, catalogue)
            Recommendations(users, 1, catalogue)
        except UserError as error:
            assert str(error).startswith(("--predict", "--top-k"))
