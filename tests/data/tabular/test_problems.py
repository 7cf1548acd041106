import numpy as np

from data.tabular.problems import Episodes, Rows
from trainer.loading.order import SampleKeys


def table(num_rows=40, num_columns=5, num_classes=3):
    """Returns features that encode their row and column, (num_rows, num_columns), and classes, (num_rows,)."""
    features = np.arange(num_rows)[:, None] + np.arange(num_columns) / 100
    return features.astype(np.float32), np.arange(num_rows) % num_classes


def episodes(features, labels, max_classes=10, num_context=20):
    return Episodes(features, labels, 50, num_context=num_context, num_queries=8, max_classes=max_classes, seed=3)


def test_an_episode_permutes_columns_and_classes():
    features, labels = table()
    batch = episodes(features, labels).__getitems__(SampleKeys(np.arange(6), epoch=2))
    assert batch["context"].shape == (6, 20, 5) and batch["queries"].shape == (6, 8, 5)
    orders, names = set(), set()
    parts = (batch[name] for name in ("context", "labels", "queries", "targets"))
    for context, told, queries, targets in zip(*parts, strict=True):
        values = np.concatenate([context, queries])
        rows, columns = np.floor(values[:, 0] + 1e-3).astype(int), np.round(values[0] % 1 * 100).astype(int)
        assert len(set(rows)) == 28 and sorted(columns) == list(range(5))
        np.testing.assert_array_equal(values, features[rows][:, columns])
        pairs = {*zip(labels[rows].tolist(), np.concatenate([told, targets]).tolist(), strict=True)}
        assert len(pairs) == 3 and {new for _, new in pairs} == {0, 1, 2}
        orders.add(tuple(columns))
        names.add(tuple(sorted(pairs)))
    assert len(orders) > 1 and len(names) > 1


def test_an_episode_is_a_function_of_its_key():
    dataset = episodes(*table())
    together = dataset.__getitems__(SampleKeys(np.array([4, 9]), epoch=1))
    alone = dataset.__getitems__(SampleKeys(np.array([9]), epoch=1))
    other = dataset.__getitems__(SampleKeys(np.array([9]), epoch=0))
    for name, values in together.items():
        np.testing.assert_array_equal(values[1:], alone[name])
    assert not np.array_equal(alone["context"], other["context"])


def test_queries_have_only_classes_of_the_context():
    features, labels = table(num_classes=9)
    batch = episodes(features, labels, num_context=6).__getitems__(SampleKeys(np.arange(20), epoch=0))
    for told, targets in zip(batch["labels"], batch["targets"], strict=True):
        assert set(targets[targets >= 0]) <= set(told)
    assert (batch["targets"] == -1).any() and (batch["targets"] >= 0).any()


def test_more_classes_than_the_model_has_are_merged():
    features, labels = table(num_rows=60, num_classes=12)
    batch = episodes(features, labels, max_classes=5).__getitems__(SampleKeys(np.arange(8), epoch=0))
    assert batch["labels"].max() == 4 and (batch["num_classes"] == 5).all()


def test_rows_know_how_much_is_known():
    features, labels = table()
    batch = Rows(features, labels, 17).__getitems__(SampleKeys(np.array([2, 5]), epoch=0))
    np.testing.assert_array_equal(batch["row"], features[[2, 5]])
    assert batch["label"].tolist() == [2, 2] and batch["num_context"].tolist() == [17, 17]
    assert "label" not in Rows(features, None, 17).__getitems__(SampleKeys(np.array([2]), epoch=0))
