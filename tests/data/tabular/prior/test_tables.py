"""Tests that tables of the prior depend only on (seed, number), are well formed and are padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.tabular.prior import tables
from data.tabular.prior.settings import PriorSettings
from data.tabular.prior.tables import PriorTables, draw_tables, write_tables
from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys

SETTINGS = PriorSettings(tables_per_shape=4)


def take(tables: PriorTables, index, epoch: int = 0) -> dict[str, np.ndarray]:
    return tables.__getitems__(SampleKeys(np.asarray(index), epoch))


def table(batch: dict[str, np.ndarray], i: int) -> dict[str, np.ndarray]:
    """Returns table i of the batch without its padding."""
    real = slice(batch["num_features"][i])
    rows, queries = slice(batch["num_context"][i]), batch["targets"][i] >= 0
    return {
        "context": batch["context"][i, rows, real],
        "labels": batch["labels"][i, rows],
        "queries": batch["queries"][i, queries, real],
        "targets": batch["targets"][i, queries],
        "num_classes": batch["num_classes"][i],
    }


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)  # NaN equals NaN


@pytest.mark.parametrize(("version", "num_threads"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("shape", [(40, 24, 3), (65, 38, 11), (300, 77, 40)])
def test_a_table_does_not_depend_on_its_batch(shape, version, num_threads):
    numbers, settings = np.arange(100, 124), replace(SETTINGS, version=version)
    alone = [draw_tables(settings, 3, numbers[i : i + 1], shape) for i in range(len(numbers))]
    torch.set_num_threads(num_threads)
    random = np.random.default_rng(0)
    for size in (3, 16):
        chosen = random.permutation(len(numbers))[:size]
        batch = draw_tables(settings, 3, numbers[chosen], shape)
        for i, number in enumerate(chosen):
            assert_same(table(batch, i), table(alone[number], 0))


def test_a_table_does_not_depend_on_the_order_of_its_batch():
    tables = PriorTables(SETTINGS, 0, 40, fresh_each_epoch=False)
    whole = take(tables, np.arange(40))
    order = np.random.default_rng(1).permutation(40)
    shuffled = take(tables, order)
    for place, number in enumerate(order):
        assert_same(table(whole, number), table(shuffled, place))


def test_padding_is_at_the_end_and_neutral():
    batch = take(PriorTables(SETTINGS, 0, 40), np.arange(40))
    assert len(set(batch["num_features"])) > 1 and len(set(batch["num_context"])) > 1
    for i in range(40):
        rows, features = batch["num_context"][i], batch["num_features"][i]
        assert not batch["context"][i, rows:].any() and not batch["context"][i, :, features:].any()
        assert not batch["labels"][i, rows:].any()
        is_query = batch["targets"][i] >= 0
        assert not batch["queries"][i, ~is_query].any() and not batch["queries"][i, :, features:].any()
        assert not np.any(is_query[1:] & ~is_query[:-1])


def test_a_group_of_tables_fills_a_batch():
    batch = take(PriorTables(SETTINGS, 0, 40), np.arange(8, 12))
    assert (batch["num_context"] == batch["context"].shape[1]).all()
    assert (batch["num_features"] == batch["context"].shape[2]).all()
    assert (batch["targets"] >= 0).all()


def test_other_seeds_and_epochs_have_other_tables():
    fixed, fresh = (PriorTables(SETTINGS, 0, 8, fresh_each_epoch=fresh) for fresh in (False, True))
    assert_same(take(fixed, range(8)), take(fixed, range(8), epoch=1))
    assert_same(take(fixed, range(8)), take(fresh, range(8)))
    # Table i of epoch 1 is table 8 + i of one long epoch.
    assert_same(take(fresh, range(8), epoch=1), take(PriorTables(SETTINGS, 0, 16), range(8, 16)))
    values = [take(tables, [0])["context"].ravel()[:6] for tables in (fixed, PriorTables(SETTINGS, 1, 8))]
    values += [take(fixed, [1])["context"].ravel()[:6]]
    assert all(not np.array_equal(values[i], values[j]) for i in range(3) for j in range(i))


def test_arrays_are_as_declared():
    batch = take(PriorTables(SETTINGS, 0, 40), np.arange(40))
    for name in ("context", "queries"):
        assert batch[name].dtype == np.float32 and batch[name].flags.c_contiguous and not np.isinf(batch[name]).any()
    for name in ("labels", "targets", "num_context", "num_features", "num_classes"):
        assert batch[name].dtype == np.int64
    assert batch["context"].shape[:2] == batch["labels"].shape and batch["queries"].shape[:2] == batch["targets"].shape


@pytest.mark.parametrize(
    "settings",
    [PriorSettings(), PriorSettings(rows=(32, 40), context_share=(0.2, 0.3)), PriorSettings(version=2)],
)
def test_context_has_every_class(settings):
    batch = take(PriorTables(settings, 5, 240), np.arange(240))
    for i in range(240):
        problem = table(batch, i)
        assert problem["num_classes"] >= 2
        assert set(problem["labels"]) == set(range(problem["num_classes"]))
        assert set(problem["targets"]) <= set(problem["labels"])


@pytest.mark.parametrize(
    "settings",
    [
        PriorSettings(rows=(32, 32), features=(1, 1), classes=2, tree_share=1.0),
        PriorSettings(rows=(32, 48), features=(1, 2), tree_share=0.0, categorical_share=1.0, missing_share=1.0),
        PriorSettings(rows=(900, 1024), features=(50, 50), tables_per_shape=2),
        PriorSettings(version=2, rows=(32, 33), features=(1, 1), classes=2, missing_share=1.0),
        PriorSettings(version=2, rows=(2000, 2048), features=(60, 60), tables_per_shape=2),
    ],
)
def test_tables_of_extreme_sizes_are_valid(settings):
    batch = take(PriorTables(settings, 0, 12), np.arange(12))
    assert not np.isinf(batch["context"]).any() and (batch["num_classes"] >= 2).all()
    assert (batch["num_classes"] <= settings.classes).all()


@pytest.mark.parametrize(("version", "num_tables"), [(1, 600), (2, 200)])
def test_kinds_of_tables_occur_in_their_shares(version, num_tables):
    batch = take(PriorTables(PriorSettings(version=version), 1, num_tables), np.arange(num_tables))
    assert 0.45 < (batch["num_classes"] == 2).mean() < 0.75 and set(batch["num_classes"]) == set(range(2, 11))
    tables = [table(batch, i)["context"] for i in range(num_tables)]
    assert 0.1 < np.mean([np.isnan(rows).any() for rows in tables]) < 0.3
    columns = [column for rows in tables for column in rows.T]
    assert 0.3 < np.mean([len(np.unique(column)) <= 20 for column in columns]) < 0.6
    assert 0 < np.mean([np.nanmin(column) == np.nanmax(column) for column in columns]) < 0.05


@pytest.mark.parametrize(("version", "num_tables", "little"), [(1, 300, 0.02), (2, 100, 0.1)])
def test_queries_can_be_predicted(version, num_tables, little):
    """Nearest neighbours beat the most frequent class by much in some tables and by little in others."""
    batch = take(PriorTables(PriorSettings(version=version, missing_share=0.0), 2, num_tables), np.arange(num_tables))
    gains = []
    for i in range(num_tables):
        problem = table(batch, i)
        deviation = problem["context"].std(axis=0) + 1e-6
        context, queries = problem["context"] / deviation, problem["queries"] / deviation
        nearest = ((queries[:, None] - context) ** 2).sum(axis=2).argsort(axis=1)[:, :5]
        votes = np.array([np.bincount(row, minlength=10).argmax() for row in problem["labels"][nearest]])
        majority = np.bincount(problem["labels"]).argmax()
        gains.append((votes == problem["targets"]).mean() - (majority == problem["targets"]).mean())
    assert np.mean(gains) > 0.04 and np.percentile(gains, 90) > 0.2 and np.percentile(gains, 25) < little


def test_written_tables_are_read_again(tmp_path):
    tables = PriorTables(SETTINGS, 0, 10)
    write_tables(tables, tmp_path / "tables.npz")
    with np.load(tmp_path / "tables.npz", allow_pickle=False) as read:
        assert_same(dict(read), take(tables, np.arange(10)))
    with pytest.raises(UserError, match=r"--prior-only .*nowhere"):
        write_tables(tables, tmp_path / "nowhere" / "tables.npz")


def test_a_table_of_one_class_is_drawn_again(monkeypatch):
    def attempt(settings, seed, numbers, shape, attempt):
        """Gives table n two classes from attempt n % 4 on."""
        return {"context": numbers + 100.0 * attempt, "num_classes": 1 + (attempt >= numbers % 4)}

    monkeypatch.setattr(tables, "_attempt", attempt)
    batch = draw_tables(SETTINGS, 0, np.array([8, 3, 6, 1]), (40, 24, 3))
    assert batch["context"].tolist() == [8.0, 303.0, 206.0, 101.0]


@pytest.mark.parametrize("count", [1, 4, 6])
def test_the_largest_batch_is_found(count):
    tables = PriorTables(SETTINGS, 3, 40, fresh_each_epoch=True)
    for epoch in (0, 2):
        sizes = [cells(take(tables, np.arange(start, start + count), epoch)) for start in range(40 - count + 1)]
        assert cells(take(tables, tables.largest(epoch, count), epoch)) == max(sizes) > min(sizes)
    assert tables.largest(0, 1000).tolist() == list(range(40))


def cells(batch):
    return batch["context"].size + batch["queries"].size
