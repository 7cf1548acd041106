"""Random numbers depend only on (seed, epoch, index, stream), and have the right distribution."""

import numpy as np
import pytest

from trainer.loading.counter_random import normal, random_bits, uniform

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def reference_mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_bits_equal_a_slow_reference() -> None:
    seed, epoch, stream = 2**40 + 3, 17, 5
    key = 0
    for part in (seed, epoch, stream):
        key = reference_mix((key + GOLDEN) ^ part)
    bits = random_bits(seed, epoch, np.array([0, 7, 10**9]), 4, stream)
    for row, index in enumerate([0, 7, 10**9]):
        sample_key = reference_mix(((index * GOLDEN) & MASK) ^ key)
        assert bits[row].tolist() == [reference_mix(sample_key + (j + 1) * GOLDEN) for j in range(4)]


def test_counter_sequence_is_splitmix64() -> None:
    """From state 0, the finaliser of multiples of the golden ratio gives the published first outputs."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [reference_mix((j + 1) * GOLDEN) for j in range(3)] == published


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (9, 128)])
def test_a_row_depends_only_on_its_index(draw, shape) -> None:
    index = np.array([5, 0, 123456789, 5])
    batch = draw(1, 2, index, shape)
    assert batch.shape == (4, *shape) and batch.dtype == np.float32
    for row, i in enumerate(index):
        assert np.array_equal(batch[row], draw(1, 2, np.array([i]), shape)[0])
    assert np.array_equal(batch[0], batch[3])
    assert draw(1, 2, index[:0], shape).shape == (0, *shape)


@pytest.mark.parametrize("draw", [uniform, normal])
def test_every_part_of_the_key_changes_the_numbers(draw) -> None:
    index = np.arange(50)
    variants = [
        draw(0, 0, index, (64,)),
        draw(1, 0, index, (64,)),
        draw(0, 1, index, (64,)),
        draw(0, 0, index, (64,), stream=1),
        draw(0, 0, index + 50, (64,)),
    ]
    for i, first in enumerate(variants):
        for second in variants[:i]:
            # 3,200 pairs of independent numbers: the correlation is below 5 / sqrt(3200).
            assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.09


def test_uniform_moments_and_range() -> None:
    u = uniform(3, 0, np.arange(1000), (1000,)).astype(np.float64)
    assert u.min() >= 0.0 and u.max() < 1.0
    for power in (1, 2, 3, 4):
        assert (u**power).mean() == pytest.approx(1 / (power + 1), abs=2e-3)
    counts = np.bincount((u * 256).astype(int).ravel(), minlength=256)
    chi_square = ((counts - u.size / 256) ** 2 / (u.size / 256)).sum()
    assert chi_square < 255 + 6 * np.sqrt(2 * 255)


@pytest.mark.parametrize("num", [999, 1000])
def test_normal_moments(num) -> None:
    z = normal(3, 0, np.arange(1000), (num,)).astype(np.float64)
    for power, moment in enumerate([0, 1, 0, 3, 0, 15], start=1):
        assert (z**power).mean() == pytest.approx(moment, abs=0.02 * power**2)
    # Neither the two numbers of a Box-Muller pair nor neighbours nor neighbouring rows are correlated.
    half = (num + 1) // 2
    assert abs((z[:, : num - half] * z[:, half:]).mean()) < 0.01
    assert abs((z[:, 1:] * z[:, :-1]).mean()) < 0.01
    assert abs((z[1:] * z[:-1]).mean()) < 0.01
    assert np.abs(z).max() < 5.8
