"""Tests random graphs of mixed functions, and the filter that drops tables with unpredictable classes."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from data.tabular.prior import graphs
from data.tabular.prior.graphs import draw_graph
from data.tabular.prior.settings import PriorSettings
from data.tabular.prior.tables import PriorTables
from data.tabular.prior.targets import is_predictable
from trainer.loading.order import SampleKeys

FUNCTIONS = sorted(set(graphs._FUNCTIONS), key=lambda function: function.__name__)


def habits(seed: int = 0) -> graphs._Habits:
    return graphs._Habits(np.random.default_rng(seed))


@pytest.mark.parametrize(("num_columns", "num_rows"), [(1, 32), (7, 128), (60, 2048)])
def test_units_are_finite_and_standardised(num_columns, num_rows):
    for number in range(20):
        units = draw_graph(0, number, 0, num_columns, 10, num_rows)
        assert units.shape == (num_columns + 10, num_rows) and units.dtype == np.float32
        assert np.isfinite(units).all() and np.abs(units.mean(axis=1)).max() < 0.2
        deviation = units.std(axis=1)  # below 1 where outliers were clipped
        assert np.median(deviation) > 0.95 and deviation.max() < 1.01 and np.abs(units).max() <= 20


def test_a_causal_graph_depends_only_on_seed_number_and_attempt():
    first = draw_graph(3, 5, 1, 4, 10, 64)
    np.testing.assert_array_equal(draw_graph(3, 5, 1, 4, 10, 64), first)
    for key in ((4, 5, 1), (3, 6, 1), (3, 5, 2), (-3, 5, 1)):
        assert not np.array_equal(draw_graph(*key, 4, 10, 64), first)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_do_not_depend_on_numpys_threads(num_threads):
    """Workers may have other numbers of threads than the process that trains."""
    code = (
        "import hashlib; from data.tabular.prior.graphs import draw_graph; "
        "print(hashlib.sha256(b''.join(draw_graph(0, i, 0, 60, 10, 2048).tobytes() for i in range(8))).hexdigest())"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(num_threads), "OMP_NUM_THREADS": str(num_threads)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    here = hashlib.sha256(b"".join(draw_graph(0, i, 0, 60, 10, 2048).tobytes() for i in range(8)))
    assert found.stdout.strip() == here.hexdigest()


def test_parents_come_first_and_some_nodes_have_none():
    drawn = [graphs._edges(np.random.default_rng(seed), 32) for seed in range(50)]
    counts = np.array([[len(parents) for parents in nodes] for nodes in drawn])
    assert all((parents < node).all() for nodes in drawn for node, parents in enumerate(nodes))
    assert counts.min() == 0 and counts.max() > 1 and (counts.mean(axis=1) < 0.5).any()


@pytest.mark.parametrize("function", FUNCTIONS, ids=[function.__name__[1:] for function in FUNCTIONS])
def test_equal_rows_have_equal_values_and_others_differ(function):
    inputs = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    inputs[20:] = inputs[:20]
    differs = []
    for seed in range(10):
        values = function(habits(seed), inputs, 5)
        assert values.shape == (40, 5) and np.isfinite(values).all()
        np.testing.assert_allclose(values[20:], values[:20], rtol=1e-4, atol=1e-4)
        differs.append(len(np.unique(values[:20, 0].round(3))) > 1)
    assert sum(differs) >= 8
    assert np.isfinite(function(habits(), np.zeros((8, 1), np.float32), 1)).all()


def test_random_choices_within_a_table_are_correlated():
    of_tables = np.array([[table.share("a kind") for _ in range(20)] for table in map(habits, range(200))])
    assert of_tables.std(axis=1).mean() < 0.8 * of_tables.std() and 0.3 < of_tables.mean() < 0.7
    integers = [habits(seed).integer("a kind", 2, 5) for seed in range(200)]
    assert set(integers) == {2, 3, 4, 5}


def test_classes_of_drawn_tables_can_be_predicted():
    """Random ferns with another seed than the filter's find it too."""
    batch = PriorTables(PriorSettings(version=2, rows=(400, 400)), 0, 60).__getitems__(SampleKeys(np.arange(60), 0))
    found = []
    for i, num_context in enumerate(batch["num_context"]):
        is_query, columns = batch["targets"][i] >= 0, slice(batch["num_features"][i])
        rows = np.concatenate([batch["context"][i, :num_context, columns], batch["queries"][i, is_query, columns]])
        labels = np.concatenate([batch["labels"][i, :num_context], batch["targets"][i, is_query]])
        found.append(is_predictable(rows, labels, num_context, (0, 0, 0)))
    assert np.mean(found) > 0.9


@pytest.mark.parametrize("num_classes", [2, 5])
def test_only_information_in_columns_can_be_predicted(num_classes):
    random = np.random.default_rng(0)
    found: dict[str, list[bool]] = {"told": [], "by chance": []}
    for seed in range(40):
        rows = random.normal(size=(300, 4)).astype(np.float32)
        rows[random.uniform(size=rows.shape) < 0.1] = np.nan
        told = np.searchsorted(np.linspace(-1, 1, num_classes - 1), np.nan_to_num(rows[:, 2]))
        for name, labels in (("told", told), ("by chance", random.permutation(told))):
            found[name].append(is_predictable(rows, labels, 200, (seed, 0, 0)))
    assert np.mean(found["told"]) > 0.95 and np.mean(found["by chance"]) < 0.3
