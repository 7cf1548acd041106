"""Tests interactions in separate files for training and test, with bad lines and with ambiguous dates."""

import numpy as np
import pytest

from data.interactions.columns import FIND_OUT, ColumnChoice
from data.interactions.hold_out import HoldOut
from data.interactions.reader import load_interactions
from data.interactions.sequences import shortest_gaps
from data.table_files import Reading
from tests.helpers.archives import zipped
from trainer.common.errors import UserError

DROP = Reading(on_bad="drop")


@pytest.fixture
def load(tmp_path):
    def run(path, columns=FIND_OUT, reading=DROP):
        return load_interactions(path, 1, tmp_path / "cache", columns, reading)

    return run


NAMED = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
PARTS = {
    "RecBole's": {
        "x.train.inter": NAMED + "a\t1\t5\t10\na\t2\t5\t20\nb\t1\t5\t10\n",
        "x.valid.inter": NAMED + "a\t3\t4\t30\n",
        "x.test.inter": NAMED + "a\t4\t4\t40\nb\t3\t1\t5\n",
        "x.item": "item_id:token\tgenre:token\n",
    },
    "CSV": {
        "train.csv": "user,item,time\na,1,10\na,2,20\nb,1,10\n",
        "validation.csv": "user,item,time\na,3,30\n",
        "test.csv": "user,item,time\na,4,40\nb,3,5\n",
    },
    "without names": {"train.txt": "a 1\na 2\nb 1\n", "dev.txt": "a 3\n", "test.txt": "a 4\nb 3\n"},
}


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("in_zip", [False, True])
def test_separate_files_define_the_split(form, in_zip, load, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in PARTS[form].items():
        (folder / name).write_text(content)
    if in_zip:
        (tmp_path / "data.zip").write_bytes(zipped(PARTS[form]))
    found = load(tmp_path / "data.zip" if in_zip else folder)
    assert found.item_ids == ("1", "2", "3", "4")
    assert (found.offsets.tolist(), found.items.tolist()) == ([0, 4, 6], [1, 2, 3, 4, 1, 3])
    assert [bounds.tolist() for bounds in HoldOut().bounds(found)] == [[2, 1], [3, 1]]
    assert any("The files define the held-out interactions: 3 of " in remark for remark in found.remarks)
    with pytest.raises(UserError, match=r"--split ratio .*: the files for training and test define the split"):
        HoldOut("ratio").bounds(found)
    if found.times is not None:  # b's test interaction is older than its training one
        assert shortest_gaps(found.offsets, found.times).min() >= 1


def test_without_a_validation_file_the_last_training_item_is_held_out(load, tmp_path):
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(PARTS["CSV"][name])
    assert [bounds.tolist() for bounds in HoldOut().bounds(load(tmp_path))] == [[1, 1], [2, 1]]


def test_parts_of_other_columns_are_refused(load, tmp_path):
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(PARTS["CSV"][name])
    (tmp_path / "test.csv").write_text("user,item\na,4\n")
    with pytest.raises(UserError, match=r"test.csv: has different columns from .*train.csv"):
        load(tmp_path, ColumnChoice(time="none"))


BAD = {
    "user,item,time\na,x,10\n,y,20\nb,x,30\n": (1, "line 3: ' y 20': the user or item is empty"),
    "user,item,time\na,x,10\na,y\na,y,\nb,x,30,4\nb,x,30\n": (3, r"line 3: 'a y': has 2 columns instead of 3"),
    "user,item,time\n,y,soon\na,x,10\nb,x,30\n": (1, "line 2: .*is empty"),
    "user,item,time\na,x,soon\na,x,10\nb,x,30\n": (1, "line 2: .*'soon' is not a time"),
    "user,item,time\na,x,10\nb,x,2024-05-31\nb,x,30\n": (1, "line 3: .*is an ISO date, but earlier times are a number"),
    '{"user": "a", "item": "x", "time": 10}\nno object\n{"user": "b", "item": "x", "time": 30}\n': (
        1, "line 2: 'no object': has 1 column instead of 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", BAD)
def test_bad_lines_are_refused_or_skipped_and_counted(content, load, tmp_path):
    path, (num_bad, reason) = tmp_path / "t.csv", BAD[content]
    path.write_text(content)
    with pytest.raises(UserError, match=rf"{reason}.*; fix it.*, or skip unreadable lines with --on-bad drop"):
        load(path, reading=Reading())
    found = load(path)
    assert (found.num_users, found.item_ids, found.times.tolist()) == (2, ("x",), [10, 30])
    [remark] = [remark for remark in found.remarks if remark.startswith("Left out")]
    assert remark.startswith(f"Left out: {num_bad} lines that cannot be read, such as --data-dir {path}, line ")


def test_a_file_with_only_bad_lines_is_refused(load, tmp_path):
    (tmp_path / "t.csv").write_text("user,item,time\n,,\n")
    with pytest.raises(UserError, match="has only a line of column names"):
        load(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("texts", "gaps", "form"),
    [
        (["01/02/2024 10:00", "13/02/2024 10:00"], [12 * 86400], "day"),
        (["02/01/2024", "02/13/2024 1:00 AM"], [12 * 86400 + 3600], "month"),
        (["1.2.2024", "31.12.2024"], [334 * 86400], "day"),
    ],
)
def test_dates_may_have_day_or_month_first(texts, gaps, form, load, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("user,item,time\n" + "".join(f"a,{k},{text}\n" for k, text in enumerate(texts)))
    found = load(path, reading=Reading())
    assert np.diff(found.times).tolist() == gaps
    assert any(f"from dates whose {form} comes first" in remark for remark in found.remarks)


def test_dates_with_the_year_first_need_no_leading_zeros(load, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("user,item,time\na,1,2024-2-9\na,2,2024/2/10 9:05\na,3,2024-02-11T00:00\n")
    assert np.diff(load(path).times).tolist() == [86400 + 9 * 3600 + 300, 86400 - 9 * 3600 - 300]


def test_ambiguous_dates_are_refused(load, tmp_path):
    for texts in (["01/02/2024", "03/05/2024"], ["13/02/2024", "02/13/2024"]):
        (tmp_path / "t.csv").write_text("user,item,time\n" + "".join(f"a,{k},{text}\n" for k, text in enumerate(texts)))
        with pytest.raises(
            UserError, match=r"t.csv: it is unclear whether the day or the month .*write dates as 2024-05"
        ):
            load(tmp_path / "t.csv")
