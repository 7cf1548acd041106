"""Data sets on a device give the same samples, order and weights as on the host."""

from itertools import cycle, islice

import numpy as np
import pytest
import torch

from trainer.loading.arrays import Array, arange_like, cast, empty_beside, namespace, rows
from trainer.loading.batches import Batch
from trainer.loading.counter_random import below, normal, random_bits, uniform
from trainer.loading.on_device import MOST_TOGETHER, DeviceLoader, Movable, moved, num_bytes
from trainer.loading.order import SampleKeys
from trainer.loading.workers import BatchLoader

HERE = torch.device("cpu")
"""The CPU stands for any device, because torch's operators work on it."""


class Parts(Movable):
    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class Numbers(Movable):
    """Data set with random draws for each sample, weights that the host can compute, and a count of its calls."""

    stays = frozenset({"lengths"})

    def __init__(self, parts: Parts, num: int, alike: bool) -> None:
        self.parts, self.table, self.lengths = parts, np.arange(num) * 10, np.arange(num) % 5
        self.rows_alike = alike  # type: ignore[misc]
        self.num_asked = [0]

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        self.num_asked[0] += 1
        index = self.here(keys.index)
        width = 4 if self.rows_alike else int(self.lengths[keys.index].max())
        drawn = uniform(7, keys.epoch, index, (width,), stream=3)
        weight = cast(rows(self.table, index) // 10 % 5, "float32")
        return {"drawn": drawn, "value": rows(self.table, index) + self.parts.values.sum(), "weight": weight}

    def weights(self, keys: SampleKeys) -> np.ndarray:
        return self.lengths[keys.index].astype(np.float32)


def collate(samples: dict[str, Array], keys: SampleKeys) -> Batch:
    return {name: torch.as_tensor(value) for name, value in samples.items()} | {"index": torch.from_numpy(keys.index)}


def datasets(alike: bool) -> list[Numbers]:
    parts = Parts(np.ones(3, np.int64))
    return [Numbers(parts, 100, alike), Numbers(parts, 60, alike)]


def some_keys(num: int) -> list[SampleKeys]:
    """Returns keys of two phases in turns, over two epochs, with placeholders and a short batch."""
    rng = np.random.default_rng(0)
    keys = [
        SampleKeys(rng.integers(0, 60, size), epoch, phase, placeholder=place % 7 == 0, progress=place / num)
        for place, (size, phase) in enumerate(islice(cycle(((4, 0), (4, 1), (3, 0))), num))
        for epoch in (int(place > num // 2),)
    ]
    return [*keys, SampleKeys(np.array([5]), 1)]


@pytest.mark.parametrize("alike", [True, False])
def test_batches_on_a_device_equal_batches_on_the_host(alike):
    own = datasets(alike)
    there = moved(own, HERE)
    keys = some_keys(3 * MOST_TOGETHER + 1)
    found = list(DeviceLoader(there, collate, HERE)(keys))
    expected = list(BatchLoader(own, collate)(keys))
    assert len(found) == len(expected) == len(keys)
    for key, one, other in zip(keys, found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"weight"}:
            assert torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype
        weights = own[key.phase].weights(key)
        assert one["weight"].tolist() == ([0.0] * len(weights) if key.placeholder else weights.tolist())


def test_samples_independent_of_their_batch_are_drawn_together():
    keys = [SampleKeys(np.arange(i, i + 4), 0) for i in range(2 * MOST_TOGETHER)]
    for alike, most in ((True, 2), (False, len(keys))):
        own = datasets(alike)[:1]
        list(DeviceLoader(moved(own, HERE), collate, HERE)(keys))
        assert own[0].num_asked == [most]


def test_large_batches_are_not_drawn_together(monkeypatch):
    monkeypatch.setattr("trainer.loading.on_device.MOST_SAMPLES_TOGETHER", 10)
    own = datasets(alike=True)[:1]
    keys = [SampleKeys(np.arange(4), 0), SampleKeys(np.arange(4), 0), SampleKeys(np.arange(50), 0)]
    assert [len(batch["index"]) for batch in DeviceLoader(moved(own, HERE), collate, HERE)(keys)] == [4, 4, 50]
    assert own[0].num_asked == [2]


def test_batches_are_drawn_one_by_one_if_memory_is_short(monkeypatch):
    own = datasets(alike=True)[0]
    keys = [SampleKeys(np.arange(i, i + 4), 0) for i in range(MOST_TOGETHER)]
    expected = list(DeviceLoader([own], collate, HERE)(keys))
    own.num_asked[0] = 0
    draw = own.__getitems__

    def lacking(keys, most=4):
        if len(keys.index) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return draw(keys)

    monkeypatch.setattr(own, "__getitems__", lacking)
    for one, other in zip(DeviceLoader([own], collate, HERE)(keys), expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    assert own.num_asked == [MOST_TOGETHER]
    monkeypatch.setattr(own, "__getitems__", lambda keys: lacking(keys, most=3))
    with pytest.raises(torch.OutOfMemoryError):
        list(DeviceLoader([own], collate, HERE)(keys))


def test_tensors_shared_by_data_sets_are_moved_once():
    own = datasets(alike=True)
    there = moved(own, HERE)
    assert there[0].parts is there[1].parts and there[0].parts is not own[0].parts
    assert isinstance(there[0].table, torch.Tensor) and isinstance(there[0].lengths, np.ndarray)
    assert own[0].device is None and isinstance(own[0].table, np.ndarray)
    assert num_bytes(own) == sum(each.nbytes for each in (own[0].table, own[1].table, own[0].parts.values))


def test_arrays_that_cannot_be_written_to_are_moved_without_a_warning(recwarn):
    values = np.arange(3)
    values.setflags(write=False)
    assert moved([Parts(values)], HERE)[0].values.tolist() == [0, 1, 2]
    assert not recwarn.list


def test_random_numbers_of_keys_are_equal_on_a_device():
    index = np.random.default_rng(0).integers(0, 2**63 - 1, 20_000)
    tensor = torch.from_numpy(index)
    bits, words = random_bits(3, 5, index, 9, 2), random_bits(3, 5, tensor, 9, 2)
    assert np.array_equal(words.numpy().view(np.uint64), bits)
    assert torch.equal(uniform(3, 5, tensor, (2, 3)), torch.from_numpy(uniform(3, 5, index, (2, 3))))
    limit = np.random.default_rng(1).integers(1, 2**31 - 1, len(index))
    assert np.array_equal(below(words, torch.from_numpy(limit)).numpy(), below(bits, limit))
    normals = normal(3, 5, tensor, (5,)).numpy()
    assert np.abs(normals - normal(3, 5, index, (5,))).max() < 2e-6


def test_functions_give_equal_results_for_arrays_and_tensors():
    array = np.arange(12.0).reshape(4, 3)
    tensor = torch.from_numpy(array)
    index = np.array([2, 0])
    assert namespace(array) is np and namespace(tensor) is torch
    assert np.array_equal(rows(tensor, torch.from_numpy(index)).numpy(), rows(array, index))
    assert np.array_equal(arange_like(3, tensor).numpy(), arange_like(3, array))
    assert cast(tensor, "int32").dtype == torch.int32 and cast(array, "int32").dtype == np.int32
    assert empty_beside(tensor, (2,)).dtype == torch.float64 and empty_beside(array, (2,)).dtype == np.float64
