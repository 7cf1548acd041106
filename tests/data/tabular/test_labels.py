import numpy as np
import pytest

from data.tabular.labels import Labels, class_labels, stratified_hold_out
from data.tabular.reader import read_table
from tests.data.tabular.test_reader import real
from trainer.common.errors import UserError


@pytest.fixture
def labels(read):
    """Returns a function that reads texts as the labels of a column y."""

    def run(*texts: object) -> Labels:
        return class_labels(read("x;y\n" + "".join(f"1;{text}\n" for text in texts)), "y")

    return run


@pytest.mark.parametrize(
    ("texts", "classes"),
    [
        (["1.0", "0.0", "1.0", "0.0"], ("0", "1")),
        (["1.0", "0", "1", "0.0"], ("0", "1")),
        (["yes", "YES", "no", "NO"], ("no", "yes")),
        (["TRUE", "True", "False", "FALSE", "TRUE"], ("FALSE", "TRUE")),
        (["a", "A", "b", "B"] * 2, ("A", "B", "a", "b")),
        (["Good", "good", "bad", "bad"] * 2, ("Good", "bad", "good")),
        (["5 %", "10 %", "5 %", "10 %"], ("5 %", "10 %")),
        (["None", "mild", "None", "mild"], ("None", "mild")),
        (["-", "+", "-", "+"], ("+", "-")),
        (["0.5", "1.0", "0.5", "1.0"], ("0.5", "1.0")),
        (["0", "1", "other"] * 30 + ["0"] * 900, ("0", "1", "other")),
    ],
)
def test_spellings_of_classes_are_merged(labels, texts, classes) -> None:
    found = labels(*texts)
    assert found.classes == classes and (found.values >= 0).all()


def test_a_missing_value_mark_among_numbers_is_not_a_class(labels) -> None:
    found = labels("0", "1", "-", "1", "0", "None")
    assert found.classes == ("0", "1") and found.values.tolist() == [0, 1, -1, 1, 0, -1]


@pytest.mark.parametrize(
    "texts",
    [
        [f"{18 + i % 40 + 0.5 * (i % 3)}" for i in range(2000)],
        [f"${1 + i % 97},250.50" for i in range(400)],
        [f"{i % 97},5" for i in range(400)],
        [1000 + 17 * (i % 120) for i in range(500)],
        [*(i % 97 for i in range(400)), "unknown"],
        range(40),
    ],
    ids=["decimals", "currency", "decimal commas", "whole numbers", "with a word", "all different"],
)
def test_a_quantity_is_refused(labels, texts) -> None:
    with pytest.raises(UserError, match=r"--label y: has .* different numbers .*; group the numbers .*as text"):
        labels(*texts)


def test_a_quantity_in_an_array_is_refused(read_arrays) -> None:
    with pytest.raises(UserError, match="different numbers from"):
        class_labels(read_arrays(X=np.zeros((60, 1)), y=np.arange(60) / 7), "y")
    assert class_labels(read_arrays(X=np.zeros((6, 1)), y=np.array([0.0, 1, np.nan] * 2)), "y").classes == ("0", "1")


def test_frequent_whole_numbers_are_classes_with_a_warning(labels) -> None:
    assert not labels(*[i % 20 for i in range(200)]).may_be_quantity
    assert labels(*[i % 29 for i in range(200)]).may_be_quantity
    assert not labels(*[f"c{i % 29}" for i in range(200)]).may_be_quantity
    assert len(labels(*[f"{0.5 * (i % 10)}" for i in range(60)]).classes) == 10


@pytest.mark.parametrize("column", ["age", "fare"])
def test_quantities_of_a_real_table_are_recognised(column) -> None:
    with pytest.raises(UserError, match=f"--label {column}: has .* different numbers"):
        class_labels(read_table(real("titanic.csv")), column)


def test_integer_labels_of_a_real_table_are_classes_with_a_warning() -> None:
    found = class_labels(read_table(real("abalone.csv")), "rings")
    assert found.may_be_quantity and len(found.classes) == 28 and np.bincount(found.values).sum() == 4177


def test_a_table_of_one_column_has_another_separator(read) -> None:
    with pytest.raises(
        UserError, match=r"--label y: no such column; the table has only the column 'x/y'; separate columns with com"
    ):
        class_labels(read("x/y\n1/a\n"), "y")


LABELS = np.random.default_rng(0).choice(5, size=997, p=[0.5, 0.3, 0.15, 0.04, 0.01])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.5, 0.9, 0.99])
def test_every_class_is_held_out_in_proportion(share) -> None:
    kept, held = stratified_hold_out(LABELS, share, seed=0)
    assert sorted([*kept, *held]) == list(range(len(LABELS)))
    for c in range(5):
        size = (c == LABELS).sum()
        assert (LABELS[kept] == c).any() and (LABELS[held] == c).any()
        assert abs((LABELS[held] == c).sum() - share * size) <= 1
    assert abs(len(held) - share * len(LABELS)) <= 3


def test_rounding_errors_accumulate_as_bounded() -> None:
    labels = np.repeat(np.arange(7), 15)
    assert len(stratified_hold_out(labels, 0.1, seed=0)[1]) == 10  # 7 times 1.5 is 10.5


def test_small_classes_are_split() -> None:
    kept, held = stratified_hold_out(np.array([0, 1, 1, 3, 3, 3]), 0.01, seed=0)
    assert 0 in kept and set(np.array([0, 1, 1, 3, 3, 3])[held]) == {1, 3}
    kept, held = stratified_hold_out(np.array([0, 1, 1, 3, 3, 3]), 0.99, seed=0)
    assert set(np.array([0, 1, 1, 3, 3, 3])[kept]) == {0, 1, 3}


def test_seeds_and_streams_choose_different_reproducible_rows() -> None:
    chosen = [stratified_hold_out(LABELS, 0.2, seed, stream)[1].tolist() for seed, stream in [(0, 0), (1, 0), (0, 1)]]
    assert len({tuple(rows) for rows in chosen}) == 3
    assert stratified_hold_out(LABELS, 0.2, seed=0)[1].tolist() == chosen[0]


def test_rows_have_equal_chances() -> None:
    labels = np.array([0] * 8 + [1] * 24)
    counts = np.bincount(np.concatenate([stratified_hold_out(labels, 0.25, seed)[1] for seed in range(2000)]))
    assert np.abs(counts / 2000 - 0.25).max() < 0.05
