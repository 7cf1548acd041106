import random
from itertools import cycle

import pytest

from data.interactions.columns import ColumnChoice
from data.interactions.histories import Histories
from data.interactions.reader import load_interactions
from tests.helpers.mutations import mutations
from trainer.common.errors import UserError

ROWS = [(u, i, 978_300_000 + 977 * (7 * u + 3 * i), i % 5 + 1) for u in range(1, 7) for i in range(u, u + 6)]
FORMS = {
    "named.csv": "user_id,item_id,timestamp,title\n" + "".join(f'{u},{i},{t},"a, {r}"\n' for u, i, t, r in ROWS),
    "u.data": "".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, t, r in ROWS),
    "ratings.dat": "".join(f"{u}::{i}::{r}::{t}\n" for u, i, t, r in ROWS),
    "excel.csv": "user;item;date\n" + "".join(f"{u};{i};2024-0{u}-{i:02d}\n" for u, i, _, _ in ROWS),
    "plain.txt": "".join(f"{u} {i}\n" for u, i, _, _ in ROWS),
}
COUNT = 70


@pytest.mark.parametrize("name", FORMS)
def test_a_damaged_log_is_read_or_refused(name, tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / name
    num_read = 0
    for k, content in enumerate(mutations(FORMS[name].encode(), COUNT, seed=3)):
        path.write_bytes(content)
        try:
            read = load_interactions(path, k % 3, tmp_path / "cache")
        except UserError as error:
            assert str(error).startswith(("--data-dir", "--k-core"))
        else:
            num_read += 1
            assert read.offsets[-1] == len(read.items)
            assert read.items.min() >= 1 and read.items.max() == read.num_items == len(read.item_ids)
            assert all("\n" not in line and "\x1b" not in line for line in read.remarks)
    assert num_read > COUNT // 10  # enough mutations must stay readable
    assert [file.name for file in folder.iterdir()] == [name]


def test_a_damaged_history_is_read_or_refused(tmp_path) -> None:
    path = tmp_path / "new.csv"
    ids = [str(i) for i in range(1, 12)]
    options = cycle([(True, False), (False, True)])
    for content in mutations(FORMS["named.csv"].encode(), COUNT, seed=4):
        path.write_bytes(content)
        with_times, mask_seen = next(options)
        try:
            histories = Histories(
                path, ColumnChoice(), ids, maxlen=4, num_places=2, with_times=with_times, mask_seen=mask_seen
            )
        except UserError as error:
            assert str(error).startswith(("--predict", "--top-k"))
        else:
            assert len(histories) == 2 * len(histories.user_ids)


def test_quotes_are_parsed_in_linear_time(tmp_path) -> None:
    draw = random.Random(0)
    lines = [f'{u}\t"{draw.choice("ab")}\t{u % 50}\t978300000\n' for u in range(30_000)]
    path = tmp_path / "quotes.tsv"
    path.write_text("user\ttitle\titem\ttime\n" + "".join(lines))
    assert load_interactions(path, 0, tmp_path / "cache").num_items == 50
