import numpy as np
import pytest
import torch

from data.tabular.prior.randomness import TableRandom, padded, products

DRAWS = {
    "uniform": lambda random: random.uniform(3, 2),
    "uniform_many": lambda random: random.uniform(1500),
    "between": lambda random: random.between(-1.0, torch.full((1, 4), 2.0), 4),
    "log_between": lambda random: random.log_between(0.1, 10.0, 4),
    "integer": lambda random: random.integer(2, 5, 7),
    "chance": lambda random: random.chance(0.5, 64),
    "normal": lambda random: random.normal(5, 3),
    "normal_many": lambda random: random.normal(40, 64),
    "of_some": lambda random: random.of(slice(None)).uniform(9),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_row_depends_only_on_its_number(name):
    numbers = np.array([5, 2**40, 0, 17])
    together = TableRandom(3, numbers, 0)
    apart = [TableRandom(3, numbers[i : i + 1], 0) for i in range(4)]
    for _ in range(8):  # crosses the borders of chunks
        values = DRAWS[name](together)
        assert torch.equal(values, torch.cat([DRAWS[name](random) for random in apart]))
        assert len({tuple(row.flatten().tolist()) for row in values}) == 4


@pytest.mark.parametrize("name", DRAWS)
def test_seeds_attempts_and_calls_differ(name):
    numbers = np.array([5])
    random = TableRandom(3, numbers, 0)
    others = [
        random,
        random,
        TableRandom(4, numbers, 0),
        TableRandom(3, numbers, 1),
        TableRandom(3, numbers, 0).of(slice(1)),
    ]
    drawn = {tuple(DRAWS[name](other).flatten().tolist()) for other in others}
    assert len(drawn) >= len(others) - (name == "of_some")  # `of` gives the same numbers again


def test_draws_have_their_distributions():
    random = TableRandom(0, np.arange(500), 0)
    uniform, normal = random.uniform(200), random.normal(200)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.005
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    counts = random.integer(2, 5, 200).flatten().bincount()
    assert counts[:2].sum() == 0 and len(counts) == 6 and (abs(counts[2:] / 25000 - 1) < 0.05).all()
    high = torch.arange(500)[:, None]
    drawn = random.integer(0, high, 50)
    assert (drawn >= 0).all() and (drawn <= high).all() and (drawn == high).any()
    logs = random.log_between(0.1, 10.0, 200).log10()
    assert abs(logs.mean()) < 0.02 and logs.min() >= -1.001 and logs.max() <= 1.001
    assert abs(random.chance(0.3, 200).float().mean() - 0.3) < 0.01


@pytest.mark.parametrize("shape", [(3, 64, 128), (20, 4, 96), (32, 32, 208)])
def test_each_table_has_its_own_products(shape):
    source = torch.Generator().manual_seed(0)
    a, b = torch.randn(30, *shape[:2], generator=source), torch.randn(30, *shape[1:], generator=source)
    together = products(a, b)
    torch.testing.assert_close(together.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-5)
    for part in (slice(1), slice(7, 9), slice(5, None)):
        assert torch.equal(products(a[part].clone(), b[part].clone()), together[part])


def test_padded_is_the_next_multiple():
    assert [padded(size) for size in (1, 15, 16, 17, 79, 80, 81)] == [16, 16, 16, 32, 80, 80, 96]
