import numpy as np
import pytest
import torch

from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.targets import _MOST_PROTOTYPES, _nearest, draw_labels, row_order

NUM_TABLES, NUM_ROWS = 400, 96


def drawn(most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = TableRandom(0, np.arange(NUM_TABLES), 0)
    units = random.of(slice(None)).normal(10, NUM_ROWS)
    return units, *draw_labels(random, units, most)


@pytest.mark.parametrize("most", [2, 3, 10])
def test_labels_are_consecutive_integers(most):
    _, labels, num_classes = drawn(most)
    for row, num in zip(labels, num_classes, strict=True):
        assert set(row.tolist()) == set(range(int(num)))
    counts = num_classes.bincount(minlength=most + 1)
    assert counts[:2].sum() == 0 and (counts[2 : most + 1] > 0).all() and len(counts) == most + 1
    assert counts[2] >= 0.45 * NUM_TABLES


def test_some_tables_have_rare_and_others_equal_classes():
    _, labels, num_classes = drawn(10)
    two = labels[num_classes == 2].float().mean(1)
    rarer = torch.minimum(two, 1 - two)
    assert (rarer < 0.1).float().mean() > 0.05 and (rarer > 0.4).float().mean() > 0.15


def test_classes_are_intervals_of_the_first_unit_or_depend_on_others():
    units, labels, num_classes = drawn(10)
    changes = labels.gather(1, units[:, 0].argsort(1)).diff(dim=1).ne(0).sum(1)
    are_intervals = (changes == num_classes - 1).float().mean()
    assert 0.3 < are_intervals < 0.6
    largest = ((units.argmax(1) == labels).float().mean(1) > 0.3).float().mean()
    assert largest > 0.01


@pytest.mark.parametrize("most", [2, 10])
def test_every_class_occurs_in_the_context(most):
    _, labels, num_classes = drawn(most)
    order = row_order(TableRandom(1, np.arange(NUM_TABLES), 0), labels, most)
    assert torch.equal(order.sort(1).values, torch.arange(NUM_ROWS).expand(order.shape))
    for row, num in zip(labels.gather(1, order), num_classes, strict=True):
        assert set(row[: int(num)].tolist()) == set(range(int(num)))


def test_other_rows_are_shuffled():
    _, labels, _ = drawn(2)
    order = row_order(TableRandom(1, np.arange(NUM_TABLES), 0), labels, 2)[:, 2:].float()
    place = torch.arange(NUM_ROWS - 2.0) - (NUM_ROWS - 3) / 2
    correlation = (order * place).sum(1) / (order.std(1) * place.std() * (NUM_ROWS - 3))
    assert abs(correlation.mean()) < 0.03


def test_the_nearest_prototype_has_the_least_distance():
    random = TableRandom(2, np.arange(20), 0)
    units = random.normal(5, 64)
    rows, num_prototypes = random.integer(0, 63, _MOST_PROTOTYPES), random.integer(1, 30, 1)
    nearest = _nearest(units, rows, num_prototypes)
    for i in range(20):
        points = units[i].T.double()
        distances = torch.cdist(points, points[rows[i, : int(num_prototypes[i])]])
        chosen = distances.gather(1, nearest[i, :, None])[:, 0]
        torch.testing.assert_close(chosen, distances.amin(1), atol=1e-3, rtol=0)
