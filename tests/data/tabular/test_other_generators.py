import numpy as np
import pytest

from data.tabular.other_generators import FAMILIES, OtherTables
from data.tabular.scores import scores
from trainer.loading.order import SampleKeys


def take(tables: OtherTables, index) -> dict[str, np.ndarray]:
    return tables.__getitems__(SampleKeys(np.asarray(index), 0))


def test_batches_are_well_formed():
    num_families = len(FAMILIES)
    batch = take(OtherTables(0, 10 * num_families, num_context=40, num_queries=20), np.arange(10 * num_families))
    most = batch["num_features"].max()
    assert batch["context"].shape == (10 * num_families, 40, most) and batch["context"].dtype == np.float32
    assert batch["queries"].shape == (10 * num_families, 20, most) and batch["queries"].dtype == np.float32
    assert np.isfinite(batch["context"]).all() and np.isfinite(batch["queries"]).all()
    for i in range(10 * num_families):
        classes = set(range(batch["num_classes"][i]))
        assert len(classes) >= 2 and set(batch["labels"][i]) == classes and set(batch["targets"][i]) <= classes
        assert not batch["context"][i, :, batch["num_features"][i] :].any()
        assert batch["context"][i, :, : batch["num_features"][i]].std(axis=0).all()
    assert all(batch[name].dtype == np.int64 for name in ("labels", "targets", "num_context", "num_features"))


def test_a_table_depends_only_on_seed_and_index():
    tables = OtherTables(0, 16)
    whole, some = take(tables, np.arange(16)), take(tables, [11, 2])
    for name in ("labels", "targets", "num_features", "num_classes"):
        np.testing.assert_array_equal(whole[name][[11, 2]], some[name])
    real = some["num_features"][0]
    np.testing.assert_array_equal(whole["queries"][11, :, :real], some["queries"][0, :, :real])
    assert not np.array_equal(take(OtherTables(1, 16), [3])["labels"], whole["labels"][3:4])


@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=[family.__name__[1:] for family in FAMILIES])
def test_the_nearest_rows_rank_the_classes(family):
    index = np.arange(family, 12 * len(FAMILIES), len(FAMILIES))
    batch = take(OtherTables(5, 12 * len(FAMILIES), num_context=300, num_queries=100), index)
    context, queries = (
        batch[name] / (1e-9 + batch["context"].std(axis=1, keepdims=True)) for name in ("context", "queries")
    )
    areas = []
    for i in range(len(index)):
        nearest = ((queries[i][:, None] - context[i]) ** 2).sum(axis=2).argsort(axis=1)[:, :15]
        votes = (batch["labels"][i][nearest][:, :, None] == np.arange(batch["num_classes"][i])).mean(axis=1)
        areas.append(scores(batch["targets"][i], votes)["auc"])
    assert np.mean(areas) > 0.6
