"""Tests the code for data sets in docs/own_task.md."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.docs.recipes import recipe
from trainer import Batch, SampleKeys


class Pictures(Dataset):
    def __init__(self, pictures, labels):
        self.pictures, self.labels = pictures, labels

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        mirrored = torch.rand(()) < 0.5
        return self.pictures[i].flip(-1) if mirrored else self.pictures[i], self.labels[i]


def test_a_torch_dataset_is_augmented_anew_in_each_epoch():
    pictures = torch.arange(24.0).view(4, 2, 3)
    task = SimpleNamespace(x=pictures, y=torch.arange(4), test_x=pictures[:2], test_y=torch.arange(2), seed=1)
    splits = recipe("A torch Dataset", Pictures=Pictures)["splits"](task)
    assert len(splits["test"]) == 2
    train = splits["train"]
    index = np.array([3, 0, 1, 2])
    epochs = [train.__getitems__(SampleKeys(index, epoch)) for epoch in range(10)]
    for batch in epochs:
        assert batch["label"].tolist() == index.tolist()
        for image, i in zip(batch["image"], index, strict=True):
            assert torch.equal(image, pictures[i]) or torch.equal(image, pictures[i].flip(-1))
    assert len({tuple(batch["image"].flatten().tolist()) for batch in epochs}) > 5


def test_a_stream_draws_new_samples_in_each_epoch():
    train = recipe("A stream")["splits"](SimpleNamespace(seed=0))["train"]
    first, second = (train.__getitems__(SampleKeys(np.arange(3), epoch)) for epoch in (0, 1))
    assert torch.equal(first["y"], first["x"].sum(1)) and not torch.equal(first["x"], second["x"])


def test_batches_have_similar_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    order = recipe("Batches of similar lengths")["order"](SimpleNamespace(lengths=lengths, seed=0), "train", 0, 10)
    assert sorted(np.concatenate(order)) == list(range(1000))
    assert np.mean([np.ptp(lengths[batch]) for batch in order]) < 5


@pytest.mark.parametrize(("few_lengths", "width"), [(False, 17), (True, 32)])
def test_ragged_samples_are_padded(few_lengths, width):
    samples = [np.arange(1, n + 1) for n in (3, 17)]
    keys = SampleKeys(np.array([5, 2]), epoch=0, few_lengths=few_lengths)
    batch = recipe("Ragged samples", Batch=Batch)["collate"](None, samples, keys)
    assert batch["tokens"].shape == (2, width)
    assert all(
        row[: len(sample)].tolist() == sample.tolist() for row, sample in zip(batch["tokens"], samples, strict=True)
    )
    assert batch["tokens"].sum() == sum(map(np.sum, samples)) and batch["weight"].tolist() == [2, 16]
