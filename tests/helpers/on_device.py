"""Compares batches of data sets on a device with batches of data sets on the host."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trainer.loading.on_device import Movable, moved
from trainer.loading.order import SampleKeys

HERE = torch.device("cpu")
"""Device of the moved data sets; the CPU suffices to test torch operators."""


def some_keys(num_samples: int, epochs: Sequence[int] = (0, 3)) -> Iterator[SampleKeys]:
    """Yields keys of all samples, random samples with repetitions, and one sample, with and without few_lengths."""
    rng = np.random.default_rng(num_samples)
    for epoch in epochs:
        for index in (np.arange(num_samples), rng.integers(0, num_samples, 9), np.array([num_samples - 1])):
            for few_lengths in (False, True):
                yield SampleKeys(index, epoch, few_lengths=few_lengths)


def assert_equal_on_a_device(datasets: Sequence[Movable]) -> None:
    """Asserts that moved data sets return bitwise equal batches, and equal weights."""
    for own, there in zip(datasets, moved(datasets, HERE), strict=True):
        for keys in some_keys(len(own)):
            expected, found = own.__getitems__(keys), there.__getitems__(keys)
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                assert isinstance(found[name], torch.Tensor) and found[name].numpy().dtype == values.dtype
                np.testing.assert_array_equal(found[name].numpy(), values, err_msg=name)
            assert np.array_equal(there.weights(keys), own.weights(keys))
